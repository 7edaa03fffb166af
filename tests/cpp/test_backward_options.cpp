// The fused backward with what shapes the scores further: runs of keys for each query, another head
// size of the values, sinks, biases and masks, and their gradients; against the same oracle.
#include <array>
#include <cmath>
#include <random>
#include <vector>

#include "backward_cases.h"
#include "check.h"

namespace {

using namespace forge_test;
using forge::AttnRange;
using forge::DType;

Case base_case(std::int64_t Tq, std::int64_t Tk, std::int64_t rep = 2) {
  Case c;
  c.B = 2;
  c.Tq = Tq;
  c.Tk = Tk;
  c.Hkv = 2;
  c.H = 2 * rep;
  c.hd = 12;
  return c;
}

void test_value_sizes() {
  constexpr std::array<std::int64_t, 2> kSizes[] = {
      {64, 32}, {32, 64}, {192, 128}, {5, 17}, {17, 1}, {1, 16}, {24, 40}, {96, 64}, {16, 512}};
  for (const auto& [hd, hv] : kSizes) {
    for (std::int64_t Tq : {2, 37, 130}) {
      Case c;
      c.Tq = Tq;
      c.Tk = 141;
      c.H = 4;
      c.Hkv = 2;
      c.hd = hd;
      c.hv = hv;
      c.causal = true;
      c.softcap = hd == 24 ? 2 : 0;
      Call call = make_call(c.named("value size"));
      call.accumulate = Tq == 37;
      if (Tq == 130) add_dlse(call);
      check_call(call);
    }
  }
}

// Sequences one behind the other, as queries and as keys.
std::vector<AttnRange> packed_runs(std::int64_t T, const std::vector<std::int64_t>& lengths) {
  std::vector<AttnRange> runs;
  std::int64_t begin = 0;
  for (std::size_t n = 0; static_cast<std::int64_t>(runs.size()) < T; ++n) {
    const std::int64_t end = std::min(T, begin + lengths[n % lengths.size()]);
    for (std::int64_t i = begin; i < end; ++i) runs.push_back({0, begin, end});
    begin = end;
  }
  return runs;
}

// Any run for any query: long, short and empty ones, some that end before they start.
std::vector<AttnRange> random_runs(const Case& c, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<AttnRange> runs;
  const auto up_to = [&](std::int64_t n) { return static_cast<std::int64_t>(random()) % (n + 1); };
  for (std::int64_t n = 0; n < c.B * c.Tq; ++n) {
    const std::int64_t start = up_to(c.Tk);
    std::int64_t end = std::min(c.Tk, start + up_to(n % 3 == 0 ? c.Tk : 20));
    if (n % 7 == 0) end = start;
    if (n % 11 == 0) end = start / 2;
    runs.push_back({up_to(2 * c.Tk) - c.Tk, start, end});
  }
  return runs;
}

void check_runs(Case c, const char* what) {
  Call call = make_call(c.named(what));
  check_call(call);
  call.accumulate = true;
  add_dlse(call);
  call.c.softcap = 2;
  check_call(call);
}

void test_runs() {
  for (bool causal : {false, true}) {
    for (std::int64_t rep : {1, 3}) {
      Case c = base_case(420, 420, rep);
      c.B = 1;
      c.causal = causal;
      c.runs = packed_runs(420, {130, 1, 50, 96, 7});
      check_runs(c, "packed");
      c.runs = packed_runs(420, {48});
      check_runs(c, "chunks");
    }
    for (std::int64_t Tq : {1, 3, 40, 300}) {
      for (std::int64_t Tk : {5, 130, 700}) {
        Case c = base_case(Tq, Tk, Tq == 300 ? 1 : 3);
        c.runs = random_runs(c, static_cast<unsigned>(Tq + Tk));
        check_runs(c, "random runs");
        c.causal = causal;
        c.window_left = 60;
        check_runs(c, "random runs, window");
      }
    }
  }
  // Every second query at either end: each block sees all keys, and hardly any row does.
  Case c = base_case(400, 600, 1);
  for (std::int64_t n = 0; n < c.B * c.Tq; ++n) {
    const std::int64_t start = n % 2 == 0 ? 0 : 570;
    c.runs.push_back({0, start, start + 30});
  }
  check_runs(c, "both ends");
}

PairValues some_pairs(const Case& c, int axes, DType dtype, int layout = 0) {
  return PairValues(
      {axes & 1 ? c.B : 1, axes & 2 ? c.H : 1, axes & 4 ? c.Tq : 1, axes & 8 ? c.Tk : 1}, dtype,
      layout);
}

constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

PairValues sinks_of(const Case& c, int axes, DType dtype) {
  return PairValues({axes & 1 ? c.B : 1, axes & 2 ? c.H : 1, axes & 4 ? c.Tq : 1, 1}, dtype, 0, 3);
}

void test_sinks() {
  for (int axes = 0; axes < 8; ++axes) {
    for (std::int64_t Tq : {2, 70}) {
      Case c = base_case(Tq, 50, 3);
      c.causal = axes % 2 == 0;
      c.hv = axes % 3 == 0 ? 9 : 0;
      c.softcap = axes == 5 ? 2 : 0;
      Call call = make_call(c.named("sinks"));
      call.in.sinks = sinks_of(c, axes, kTypes[axes % 3]);
      call.in.sinks.randomize(7, axes == 7 ? 2 : 0);
      call.dsinks = sinks_of(c, axes, kTypes[(axes + Tq) % 3]);
      check_call(call);
      add_dlse(call);
      call.accumulate = true;
      check_call(call);
    }
  }
  for (float sink : {100.0f, -100.0f, 20.0f}) {
    Case c = base_case(70, 50);
    Call call = make_call(c.named("sinks far from the scores"));
    call.in.sinks = sinks_of(c, 2, DType::kFloat32);
    call.in.sinks.fill([&](auto...) { return sink; });
    call.dsinks = call.in.sinks;
    add_dlse(call);
    check_call(call);
  }
}

// Rows that see no key, and rows whose keys are all hidden, give dsinks their dlse alone.
void test_sink_alone() {
  for (std::int64_t Tq : {40, 300}) {
    Case c = base_case(Tq, 90, 1);
    c.runs = random_runs(c, 3);
    Call clean = make_call(c.named("sink alone"));
    clean.in.sinks = sinks_of(c, 6, DType::kFloat32);
    clean.in.sinks.randomize(5, 1);
    clean.dsinks = clean.in.sinks;
    clean.in.mask = some_pairs(c, 12, DType::kBool);
    clean.in.mask.randomize(6, 1);
    for (std::int64_t j = 0; j < c.Tk; ++j) clean.in.mask.set(0, 0, 5, j, 0);
    add_dlse(clean);
    check_call(clean);
    Call call = clean;
    std::vector<double> o(static_cast<std::size_t>(c.hd));
    int alone = 0;
    for (std::int64_t b = 0; b < c.B; ++b) {
      for (std::int64_t i = 0; i < Tq; ++i) {
        if (oracle_row(c, clean.in, b, 0, i, o.data()).live) continue;
        ++alone;
        call.in.q.at(b, i, 0, 1) = NAN;
        call.in.q.at(b, i, 1, 3) = INFINITY;
        call.dout.at(b, i, 0, 2) = NAN;
        call.dout.at(b, i, 1, 2) = -INFINITY;
      }
    }
    CHECK(alone > 4);
    for (CpuTarget target : forge::usable_cpu_targets()) {
      CHECK_MSG(same_bits(run(clean, target), run(call, target)),
                "%s: a row of a sink alone leaves a trace", forge::cpu_target_name(target));
    }
  }
}

void test_bias() {
  for (int axes = 0; axes < 16; ++axes) {
    for (int variant = 0; variant < 6; ++variant) {
      // Few queries, one block and splits of keys; many, of which three are in several blocks.
      const std::int64_t Tq = variant < 3 ? 4 : 150, Tk = variant < 3 ? 700 : 110;
      Case c = base_case(Tq, Tk, variant % 3 + 1);
      c.causal = variant % 2 == 1;
      c.softcap = variant % 3 == 1 ? 2 : 0;
      if (variant == 4) c.window_left = 30;
      if (variant == 5) c.runs = random_runs(c, 9);
      Call call = make_call(c.named("bias"));
      call.in.bias = some_pairs(c, axes, kTypes[(axes + variant) % 3], (axes + variant) % 3);
      call.in.bias.randomize(11, variant % 2);
      call.dbias = some_pairs(c, axes, kTypes[(axes * 2 + variant) % 3], axes % 2 == 0 ? 0 : 3);
      call.accumulate = (axes + variant) % 4 == 0;
      if (variant % 2 == 0) {
        call.in.mask = some_pairs(c, (axes * 5 + variant) % 16, DType::kBool, variant % 3);
        call.in.mask.randomize(12, 2);
        add_dlse(call);
      }
      check_call(call);
    }
  }
}

void test_masks() {
  for (int axes : {4, 8, 12, 13, 15}) {
    for (int layout : {0, 1, 2}) {
      Case c = base_case(250, 170, layout + 1);
      c.causal = layout == 1;
      Call call = make_call(c.named("mask"));
      call.in.mask = some_pairs(c, axes, DType::kBool, layout);
      call.in.mask.randomize(3, 4);
      // Tiles hidden whole, and rows.
      call.in.mask.fill([&](std::int64_t, std::int64_t, std::int64_t i, std::int64_t j) {
        return (j < 48 || j >= 144) && (i != 7 || axes == 8) && (i + j) % 5 != 0 ? 1.0f : 0.0f;
      });
      check_call(call);
    }
  }
}

// A mask that hides nothing changes no bit, nor does a bias of zeros.
void test_nothing_hidden() {
  Case c = base_case(150, 110, 3);
  c.causal = true;
  const Call plain = make_call(c.named("nothing hidden"));
  Call masked = plain, biased = plain;
  masked.in.mask = some_pairs(c, 12, DType::kBool);
  masked.in.mask.fill([](auto...) { return 1.0f; });
  biased.in.bias = some_pairs(c, 8, DType::kFloat32);
  biased.in.bias.fill([](auto...) { return 0.0f; });
  for (CpuTarget target : forge::usable_cpu_targets()) {
    const Gradients want = run(plain, target);
    CHECK(same_bits(want, run(masked, target)));
    CHECK(same_bits(want, run(biased, target)));
  }
}

// What is not finite in hidden keys and in rows of which nothing is visible reaches nothing.
void test_hidden_is_invisible() {
  for (std::int64_t Tq : {4, 150}) {
    for (int axes : {12, 14, 8}) {
      for (bool by_bias : {false, true}) {
        Case c = base_case(Tq, 130, 2);
        c.softcap = axes == 14 ? 2 : 0;
        Call clean = make_call(c.named("hidden"));
        PairValues& hider = by_bias ? clean.in.bias : clean.in.mask;
        hider = some_pairs(c, axes, by_bias ? DType::kFloat32 : DType::kBool);
        hider.randomize(4, 1);
        const auto hide = by_bias ? -INFINITY : 0.0f;
        hider.fill([&](std::int64_t, std::int64_t, std::int64_t i, std::int64_t j) {
          const bool hidden = j == 5 || j == 100 || (i == 2 && axes != 8) || (i + j) % 9 == 0;
          return hidden && !(axes == 8 && j % 50 != 0 && j != 5) ? hide : by_bias ? 0.5f : 1.0f;
        });
        clean.dbias = by_bias ? hider : some_pairs(c, axes, DType::kFloat32);
        Call call = clean;
        for (std::int64_t b = 0; b < c.B; ++b) {
          call.in.k.at(b, 100, 0, 3) = NAN;
          call.in.k.at(b, 5, 1, 3) = INFINITY;
          call.in.v.at(b, 100, 1, 2) = NAN;
          call.in.v.at(b, 5, 0, 4) = -INFINITY;
          if (axes == 8) continue;
          call.in.q.at(b, 2, 0, 1) = NAN;
          call.in.q.at(b, 2, 1, 1) = INFINITY;
          call.dout.at(b, 2, 2, 1) = NAN;
        }
        if (axes == 8) call.in.k = clean.in.k, call.in.v = clean.in.v;
        for (std::int64_t b = 0; b < c.B && axes == 8; ++b) {
          call.in.k.at(b, 5, 0, 3) = NAN;
          call.in.v.at(b, 5, 1, 2) = INFINITY;
        }
        for (CpuTarget target : forge::usable_cpu_targets()) {
          CHECK_MSG(same_bits(run(clean, target), run(call, target)),
                    "%s %s: hidden pairs leave a trace", forge::cpu_target_name(target),
                    call.c.name.c_str());
        }
      }
    }
  }
}

// A NaN in a row that sees some keys reaches its own gradients and those of these keys alone.
void test_non_finite_rows() {
  Case c = base_case(150, 130, 1);
  c.runs = packed_runs(150, {40, 7});
  for (AttnRange& run : c.runs) {
    run.key_start = std::min(run.key_start, c.Tk);
    run.key_end = std::min(run.key_end, c.Tk);
  }
  c.runs.insert(c.runs.end(), c.runs.begin(), c.runs.end());
  for (int what = 0; what < 4; ++what) {
    Call call = make_call(c.named("non-finite, packed"));
    call.in.mask = some_pairs(c, 12, DType::kBool);
    call.in.mask.randomize(8, 3);
    call.in.bias = some_pairs(c, 12, DType::kFloat32);
    call.in.bias.randomize(9, 0);
    call.dbias = call.in.bias;
    if (what == 0) call.in.q.at(0, 60, 1, 3) = NAN;
    if (what == 1) call.dout.at(0, 60, 1, 3) = NAN;
    if (what == 2) call.in.v.at(1, 60, 1, 3) = NAN;
    if (what == 3) call.in.bias.set(0, 0, 60, 64, NAN);
    check_call(call);
  }
}

// Gradients of a bias without queries or keys at all are zeros.
void test_empty() {
  for (std::int64_t Tq : {0, 3}) {
    Case c = base_case(Tq, Tq == 0 ? 5 : 0);
    Call call = make_call(c.named("empty"));
    call.in.bias = call.dbias = some_pairs(c, 2, DType::kFloat32);
    call.in.bias.randomize(1, 0);
    call.in.sinks = call.dsinks = sinks_of(c, 2, DType::kFloat32);
    call.in.sinks.randomize(2, 0);
    add_dlse(call);
    check_call(call);
  }
}

}  // namespace

int main() {
  test_value_sizes();
  test_runs();
  test_sinks();
  test_sink_alone();
  test_bias();
  test_masks();
  test_nothing_hidden();
  test_hidden_is_invisible();
  test_non_finite_rows();
  test_empty();
  return test_result();
}
