// The fused backward against a float64 oracle that shares nothing with it: shapes off every tile,
// all options, strides, grouped heads, NaN and infinity, dead rows, accumulation; the same bits at
// any thread count.
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "backward_cases.h"
#include "check.h"
#include "core/thread_pool.h"

namespace {

using namespace forge_test;

void check_gradients(const Case& c) { check_call(make_call(c)); }

void test_shapes() {
  for (std::int64_t T : {1, 2, 7, 31, 33, 63, 64, 65, 127, 129, 193, 257, 400}) {
    Case c;
    c.Tq = c.Tk = T;
    c.H = 2;
    c.Hkv = 1;
    c.hd = 64;
    check_gradients(c.named("full"));
    c.causal = true;
    check_gradients(c.named("causal"));
  }
  for (std::int64_t hd :
       {1, 2, 3, 5, 6, 7, 8, 15, 16, 17, 31, 33, 40, 48, 65, 80, 96, 112, 127, 129, 257, 512}) {
    Case c;
    c.Tq = 37;
    c.Tk = 141;
    c.H = 3;
    c.Hkv = 3;
    c.hd = hd;
    c.causal = true;
    check_gradients(c.named("head size"));
  }
  for (std::int64_t Tq : {1, 2, 3, 5, 8, 40}) {
    for (std::int64_t Tk : {0, 1, 5, 130, 1000, 3001}) {
      Case c;
      c.Tq = Tq;
      c.Tk = Tk;
      c.H = 6;
      c.Hkv = Tk == 1000 ? 6 : 2;
      c.hd = 24;
      c.causal = true;
      check_gradients(c.named("Tq != Tk"));
      c.causal = false;
      check_gradients(c.named("Tq != Tk, full"));
    }
  }
  for (std::int64_t rep : {1, 3, 4, 8}) {
    Case c;
    c.B = 2;
    c.Tq = 75;
    c.Tk = 60;
    c.Hkv = 2;
    c.H = 2 * rep;
    c.hd = 16;
    c.causal = true;
    check_gradients(c.named("group"));
  }
}

void test_options() {
  for (int bits = 0; bits < 64; ++bits) {
    Case c;
    c.B = 2;
    c.Tq = 70;
    c.Tk = 90;
    c.H = 4;
    c.Hkv = 2;
    c.hd = 20;
    c.causal = bits & 1;
    if (bits & 2) c.window_left = 17;
    if (bits & 4) c.window_right = 9;
    if (bits & 8) c.softcap = 1.5;
    if (bits & 16) c.offsets = {-30, 60};
    if (bits & 32) c.key_start = {3, 20}, c.key_end = {41, 90};
    c.scale = bits % 3 == 0 ? -0.7 : 0.4;
    Call call = make_call(c.named("options"));
    call.accumulate = bits % 5 == 0;
    if (bits % 3 == 0) add_dlse(call);
    check_call(call);
    call.c.Tq = 3;
    call = make_call(call.c.named("options, few queries"));
    if (bits % 3 == 1) add_dlse(call);
    call.accumulate = bits % 2 == 0;
    check_call(call);
  }
  for (std::int64_t left : {0, 1, 46, 47, 48, 62, 63, 64, 95, 96, 131}) {
    Case c;
    c.Tq = c.Tk = 500;
    c.hd = 4;
    c.causal = true;
    c.window_left = left;
    check_gradients(c.named("window"));
  }
}

void test_extreme_scores() {
  Case c;
  c.Tq = c.Tk = 200;
  c.H = 4;
  c.Hkv = 2;
  c.hd = 16;
  c.causal = true;
  for (float size : {20.0f, 1e2f, 1e4f}) {
    c.q_size = size;
    check_gradients(c.named("large scores"));
    c.softcap = 30;
    check_gradients(c.named("large scores, capped"));
    c.softcap = 0;
  }
  for (float q : {1e9f, -1e9f}) {
    c.hd = 1;
    c.scale = 1;
    Call call = make_call(c.named("equal huge scores"));
    call.in.q.fill(q);
    call.in.k.fill(1);
    check_call(call);
  }
}

void test_strides() {
  for (int layout = 0; layout < kLayouts; ++layout) {
    for (int which = 0; which < 4; ++which) {
      for (std::int64_t Tq : {2, 45}) {
        Case c;
        c.B = 2;
        c.Tq = Tq;
        c.Tk = 45;
        c.H = 4;
        c.Hkv = 2;
        c.hd = 19;
        c.causal = true;
        Call call = make_call(c.named("strides"));
        Array* arrays[] = {&call.in.q, &call.in.k, &call.in.v, &call.dout};
        arrays[which]->relayout(layout);
        check_call(call);
      }
    }
  }
}

// Which elements differ in their bits.
std::vector<bool> changed(const std::vector<float>& a, const std::vector<float>& b) {
  std::vector<bool> result(a.size());
  for (std::size_t n = 0; n < a.size(); ++n) result[n] = std::memcmp(&a[n], &b[n], 4) != 0;
  return result;
}

Case window_case(std::int64_t Tq) {
  Case c;
  c.Tq = Tq;
  c.Tk = 150;
  c.H = 2;
  c.Hkv = 1;
  c.hd = 12;
  c.causal = true;
  c.window_left = 70;
  return c;
}

// A bad row of k or v changes gradients only where somebody who sees it reaches.
void test_reach_of_key(const Call& clean, const Call& bad, std::int64_t key) {
  const Case& c = clean.c;
  for (CpuTarget target : forge::usable_cpu_targets()) {
    const Gradients a = run(clean, target), b = run(bad, target);
    const std::vector<bool> dq = changed(a.dq, b.dq), dk = changed(a.dk, b.dk);
    for (std::int64_t i = 0; i < c.Tq; ++i) {
      if (c.sees(0, i, key)) continue;
      for (std::int64_t e = 0; e < c.H * c.hd; ++e) {
        CHECK_MSG(!dq[static_cast<std::size_t>(i * c.H * c.hd + e)],
                  "%s %s: key %d reaches dq of row %d", forge::cpu_target_name(target),
                  bad.c.name.c_str(), static_cast<int>(key), static_cast<int>(i));
      }
    }
    for (std::int64_t j = 0; j < c.Tk; ++j) {
      bool shared = false;
      for (std::int64_t i = 0; i < c.Tq; ++i) shared |= c.sees(0, i, j) && c.sees(0, i, key);
      for (std::int64_t e = 0; e < c.hd && !shared; ++e) {
        CHECK_MSG(!dk[static_cast<std::size_t>(j * c.hd + e)], "%s %s: key %d reaches dk of key %d",
                  forge::cpu_target_name(target), bad.c.name.c_str(), static_cast<int>(key),
                  static_cast<int>(j));
      }
    }
  }
}

void test_reach_of_row(const Call& clean, const Call& bad, std::int64_t row) {
  const Case& c = clean.c;
  for (CpuTarget target : forge::usable_cpu_targets()) {
    const Gradients a = run(clean, target), b = run(bad, target);
    const std::vector<bool> dq = changed(a.dq, b.dq), dk = changed(a.dk, b.dk),
                            dv = changed(a.dv, b.dv);
    for (std::int64_t n = 0; n < c.Tq * c.H * c.hd; ++n) {
      if (n / (c.H * c.hd) != row) CHECK(!dq[static_cast<std::size_t>(n)]);
    }
    for (std::int64_t n = 0; n < c.Tk * c.hd; ++n) {
      if (c.sees(0, row, n / c.hd)) continue;
      CHECK_MSG(!dk[static_cast<std::size_t>(n)] && !dv[static_cast<std::size_t>(n)],
                "%s %s: row %d reaches key %d", forge::cpu_target_name(target), bad.c.name.c_str(),
                static_cast<int>(row), static_cast<int>(n / c.hd));
    }
  }
}

void test_non_finite() {
  for (std::int64_t Tq : {4, 150}) {
    for (float bad : {NAN, INFINITY, -INFINITY}) {
      for (std::int64_t row : {0, 5, 60, 149}) {
        const Call clean = make_call(window_case(Tq));
        Call call = make_call(window_case(Tq).named("non-finite v"));
        call.in.v.at(0, row, 0, 3) = bad;
        check_call(call);
        test_reach_of_key(clean, call, row);
        call = make_call(window_case(Tq).named("non-finite k"));
        call.in.k.at(0, row, 0, 3) = bad;
        if (std::isnan(bad)) check_call(call);
        test_reach_of_key(clean, call, row);
        call = make_call(window_case(Tq).named("non-finite q"));
        call.in.q.at(0, row % Tq, 1, 3) = bad;
        if (std::isnan(bad)) check_call(call);
        test_reach_of_row(clean, call, row % Tq);
        call = make_call(window_case(Tq).named("non-finite do"));
        call.dout.at(0, row % Tq, 1, 3) = bad;
        if (std::isnan(bad)) check_call(call);
        test_reach_of_row(clean, call, row % Tq);
      }
    }
  }
}

// Rows that see nothing leave no trace, whatever they hold.
void test_dead_rows() {
  for (std::int64_t Tq : {30, 300}) {
    for (bool accumulate : {false, true}) {
      Case c;
      c.Tq = Tq;
      c.Tk = 20;
      c.H = 2;
      c.Hkv = 1;
      c.hd = 8;
      c.causal = true;
      Call clean = make_call(c.named("dead rows"));
      clean.accumulate = accumulate;
      add_dlse(clean);
      check_call(clean);
      Call call = clean;
      for (std::int64_t i = 0; i < Tq - c.Tk; ++i) {
        call.in.q.at(0, i, 1, 2) = NAN;
        call.dout.at(0, i, 0, 5) = NAN;
        call.dlse[static_cast<std::size_t>(Tq + i)] = NAN;
      }
      for (CpuTarget target : forge::usable_cpu_targets()) {
        CHECK_MSG(same_bits(run(clean, target), run(call, target)), "%s: a dead row leaves a trace",
                  forge::cpu_target_name(target));
      }
    }
  }
  // (b) of the public case: dv counts the live rows.
  Case c;
  c.Tq = 5;
  c.Tk = 2;
  c.H = 2;
  c.Hkv = 1;
  c.hd = 4;
  c.causal = true;
  Call call = make_call(c.named("dead rows of zeros"));
  call.in.q.fill(0);
  call.in.k.fill(0);
  call.dout.fill(1);
  for (std::int64_t i = 0; i < 3; ++i)
    for (std::int64_t h = 0; h < 2; ++h)
      for (std::int64_t e = 0; e < 4; ++e) call.dout.at(0, i, h, e) = NAN;
  for (CpuTarget target : forge::usable_cpu_targets()) {
    const Gradients got = run(call, target);
    for (std::size_t e = 0; e < 4; ++e) {
      CHECK(got.dv[e] == 3.0f);
      CHECK(got.dv[4 + e] == 1.0f);
    }
    for (float x : got.dq) CHECK(std::isfinite(x));
  }
}

// Keys that nobody sees get exact zeros, or keep what they hold.
void test_unseen_keys() {
  for (bool accumulate : {false, true}) {
    Case c;
    c.B = 2;
    c.Tq = 40;
    c.Tk = 300;
    c.hd = 10;
    c.causal = true;
    c.offsets = {100, 20};
    c.window_left = 9;
    Call call = make_call(c.named("unseen keys"));
    call.accumulate = accumulate;
    check_call(call);
    const std::vector<float> before = start_values(c.B * c.Tk * c.hd, accumulate);
    for (CpuTarget target : forge::usable_cpu_targets()) {
      const Gradients got = run(call, target);
      for (std::int64_t n = 0; n < c.B * c.Tk * c.hd; ++n) {
        const std::int64_t b = n / (c.Tk * c.hd), j = n / c.hd % c.Tk;
        bool seen = false;
        for (std::int64_t i = 0; i < c.Tq; ++i) seen |= c.sees(b, i, j);
        const std::size_t at = static_cast<std::size_t>(n);
        const float want = accumulate ? before[at] : 0.0f;
        if (!seen) CHECK(got.dk[at] == want && got.dv[at] == want);
      }
    }
  }
}

// Every query sees one key, so m is that pair's score, and p is exactly 1 if and only if the
// backward's score is not below it. Any difference in the order of operations gives lower scores in
// half of the pairs. The query offset moves the pairs across the tiles.
void test_scores_match_forward() {
  for (std::int64_t hd : {1, 7, 64, 100, 128}) {
    for (std::int64_t offset : {0, 5, 47, 100}) {
      Case c;
      c.Tq = 233;
      c.Tk = 333;
      c.H = c.Hkv = 2;
      c.hd = hd;
      c.q_size = 10;
      c.causal = true;
      c.window_left = 0;
      c.offsets = {offset};
      c.softcap = offset == 5 ? 3 : 0;
      const Call call = make_call(c.named("one key a query"));
      for (CpuTarget target : forge::usable_cpu_targets()) {
        const Gradients got = run(call, target);
        for (std::int64_t n = 0; n < c.Tq * c.H * hd; ++n) {
          const std::int64_t i = n / (c.H * hd), h = n / hd % c.H;
          const float dv = got.dv[static_cast<std::size_t>(n + offset * c.H * hd)];
          CHECK_MSG(dv == call.dout.at(0, i, h, n % hd), "%s %s: row %d",
                    forge::cpu_target_name(target), call.c.name.c_str(), static_cast<int>(i));
        }
      }
    }
  }
}

}  // namespace

int main() {
  test_shapes();
  test_options();
  test_extreme_scores();
  test_strides();
  test_non_finite();
  test_dead_rows();
  test_unseen_keys();
  test_scores_match_forward();
  return test_result();
}
