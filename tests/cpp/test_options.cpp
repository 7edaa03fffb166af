// What shapes the scores beyond masks of one sequence, through the fused forward: runs of keys for
// each query, another value size, sinks, biases and masks; against the float64 oracle, at any
// thread count, in any company.
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "attention_cases.h"
#include "check.h"
#include "core/thread_pool.h"
#include "forward_checks.h"

namespace {

using forge::AttnRange;
using forge::DType;
using namespace forge_test;

const DType kTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

Case plain(std::int64_t Tq, std::int64_t Tk) {
  Case c;
  c.B = 2;
  c.Tq = Tq;
  c.Tk = Tk;
  c.H = 4;
  c.Hkv = 2;
  c.hd = 20;
  return c;
}

// Sequences end to end in one row, each query seeing its own one.
std::vector<AttnRange> packed_runs(const Case& c, std::int64_t length) {
  std::vector<AttnRange> runs;
  for (std::int64_t b = 0; b < c.B; ++b) {
    for (std::int64_t i = 0; i < c.Tq; ++i) {
      const std::int64_t start = i / length * length;
      runs.push_back({0, std::min(start, c.Tk), std::min(start + length, c.Tk)});
    }
  }
  return runs;
}

// In any order, some of them empty, some the wrong way round; `reach`: no longer than that.
std::vector<AttnRange> random_runs(const Case& c, unsigned seed, std::int64_t reach) {
  std::mt19937 random(seed);
  std::vector<AttnRange> runs;
  for (std::int64_t n = 0; n < c.B * c.Tq; ++n) {
    const auto start = static_cast<std::int64_t>(random() % static_cast<unsigned>(c.Tk + 1));
    const std::int64_t length = static_cast<std::int64_t>(random() % static_cast<unsigned>(reach));
    std::int64_t end = std::min(c.Tk, start + length);
    if (random() % 16 == 0) end = start / 2;
    runs.push_back({static_cast<std::int64_t>(random() % 80) - 20, start, end});
  }
  return runs;
}

void test_runs() {
  for (std::int64_t Tq : {1, 3, 70, 300}) {
    for (int bits = 0; bits < 8; ++bits) {
      Case c = plain(Tq, Tq < 70 ? 700 : Tq);
      c.causal = bits & 1;
      if (bits & 2) c.window_left = 19;
      if (bits & 4) c.softcap = 1.5;
      for (std::int64_t length : {1, 16, 50, 1000}) {
        c.runs = packed_runs(c, length);
        check_case(c.named("packed"));
      }
      for (std::int64_t reach : {8, 300}) {
        c.runs = random_runs(c, 7, reach);
        check_case(c.named("runs in any order"));
      }
    }
  }
  // One head and keys enough that the tiles of keys are shared out.
  Case c = plain(40, 3000);
  c.B = c.H = c.Hkv = 1;
  c.runs = random_runs(c, 8, 500);
  check_case(c.named("runs over shared tiles"));
  Case far = plain(130, 3000);
  for (std::int64_t n = 0; n < far.B * far.Tq; ++n) {
    far.runs.push_back(n % 3 == 0 ? AttnRange{0, 2990, 3000} : AttnRange{0, n % 7, 9});
  }
  check_case(far.named("runs at both ends"));
}

// A key that no query sees is not read, wherever it lies between others.
void test_unseen_keys() {
  for (std::int64_t Tq : {2, 100}) {
    Case c = plain(Tq, 2000);
    for (std::int64_t n = 0; n < c.B * c.Tq; ++n) {
      c.runs.push_back(n % 2 == 0 ? AttnRange{0, 3, 140} : AttnRange{0, 1700, 1801});
    }
    Arrays arrays = make_arrays(c);
    for (std::int64_t j = 0; j < c.Tk; ++j) {
      if ((j >= 3 && j < 140) || (j >= 1700 && j < 1801)) continue;
      for (std::int64_t b = 0; b < c.B; ++b) {
        for (std::int64_t g = 0; g < c.Hkv; ++g) {
          arrays.k.at(b, j, g, j % c.hd) = j % 3 == 0 ? NAN : INFINITY;
          arrays.v.at(b, j, g, j % c.hd) = NAN;
        }
      }
    }
    check_case(c.named("unseen keys"), arrays);
  }
}

void test_value_sizes() {
  for (std::int64_t Tq : {1, 5, 80}) {
    for (std::int64_t hd : {1, 20, 64, 129, 300}) {
      for (std::int64_t hv : {1, 3, 16, 65, 136, 512}) {
        Case c = plain(Tq, 170);
        c.hd = hd;
        c.hv = hv;
        c.causal = true;
        check_case(c.named("value size"));
      }
    }
  }
  for (int layout = 0; layout < kLayouts; ++layout) {
    for (std::int64_t Tq : {2, 45}) {
      Case c = plain(Tq, 45);
      c.hv = 9;
      Arrays arrays = make_arrays(c);
      arrays.v.relayout(layout);
      check_case(c.named("value size, strides"), arrays);
    }
  }
}

void test_sinks() {
  for (std::int64_t Tq : {1, 4, 90}) {
    for (DType dtype : kTypes) {
      for (int layout = 0; layout < 3; ++layout) {
        for (int axes = 0; axes < 8; ++axes) {
          Case c = plain(Tq, 200);
          c.causal = true;
          c.offsets = {-2, 110};  // the first rows of a sequence see nothing
          c.hv = 7;
          Arrays arrays = make_arrays(c);
          arrays.sinks = PairValues(
              {axes & 1 ? c.B : 1, axes & 2 ? c.H : 1, axes & 4 ? c.Tq : 1, 1}, dtype, layout, 3);
          arrays.sinks.randomize(5, 2);
          check_case(c.named("sinks"), arrays);
        }
      }
    }
    for (float sink : {NAN, INFINITY, 1e9f, -1e9f, 0.0f, -0.0f}) {
      Case c = plain(Tq, 200);
      c.offsets = {-3};
      c.causal = true;
      Arrays arrays = make_arrays(c);
      arrays.sinks = PairValues({1, 1, 1, 1}, DType::kFloat32, 0, 3);
      arrays.sinks.set(0, 0, 0, 0, sink);
      check_case(c.named("one sink"), arrays);
    }
  }
  Case c = plain(3, 1);
  c.Tk = 0;
  Arrays arrays = make_arrays(c);
  arrays.sinks = PairValues({1, c.H, 1, 1}, DType::kFloat32, 0, 3);
  arrays.sinks.randomize(6, 2);
  check_case(c.named("sinks without keys"), arrays);
  c.Tq = 150;
  check_case(c.named("no keys"));
}

// The axes of a bias or a mask that are not 1, as bits.
PairValues values_for(const Case& c, DType dtype, int layout, int axes) {
  return PairValues(
      {axes & 1 ? c.B : 1, axes & 2 ? c.H : 1, axes & 4 ? c.Tq : 1, axes & 8 ? c.Tk : 1}, dtype,
      layout);
}

void test_biases_and_masks() {
  for (std::int64_t Tq : {1, 3, 75}) {
    for (int axes = 0; axes < 16; ++axes) {
      for (int layout = 0; layout < 3; ++layout) {
        for (int what = 1; what < 4; ++what) {
          Case c = plain(Tq, 170);
          c.causal = axes % 3 == 0;
          if (layout == 1) c.softcap = 2;
          Arrays arrays = make_arrays(c);
          const unsigned hidden = layout == 2 ? 6 : 2;
          const DType dtype = kTypes[(axes + layout) % 3];
          if (what & 1) arrays.bias = values_for(c, dtype, layout, axes);
          if (what & 2) arrays.mask = values_for(c, DType::kBool, layout, axes * 7 % 16);
          if (what & 1) arrays.bias.randomize(8, hidden);
          if (what & 2) arrays.mask.randomize(9, hidden);
          check_case(c.named("bias and mask"), arrays);
        }
      }
    }
  }
}

// Tiles that are hidden whole, shown whole, and in part; rows that all is hidden from.
void test_blocks_of_a_mask() {
  for (std::int64_t Tq : {2, 140}) {
    for (std::int64_t block : {30, 144, 256}) {
      for (bool bias : {false, true}) {
        Case c = plain(Tq, 700);
        Arrays arrays = make_arrays(c);
        PairValues& values = bias ? arrays.bias : arrays.mask;
        values = values_for(c, bias ? DType::kFloat32 : DType::kBool, 0, 14);
        values.fill([=](auto, auto h, auto i, auto j) {
          const bool shown = i % 11 != 5 && (i / block + j / block + h) % 3 == 0;
          if (bias) return shown ? 0.0f : -INFINITY;
          return shown ? 1.0f : 0.0f;
        });
        check_case(c.named("blocks of a mask"), arrays);
        arrays.sinks = PairValues({1, c.H, 1, 1}, DType::kFloat32, 0, 3);
        arrays.sinks.randomize(3, 2);
        check_case(c.named("blocks of a mask, sinks"), arrays);
      }
    }
  }
}

// What is hidden reaches nothing, NaN in a bias what sees it.
void test_non_finite() {
  for (std::int64_t Tq : {1, 3, 90}) {
    for (int what = 0; what < 3; ++what) {
      for (float bad : {NAN, INFINITY, -INFINITY}) {
        Case c = plain(Tq, 300);
        c.causal = what == 1;
        Arrays arrays = make_arrays(c);
        PairValues& values = what == 0 ? arrays.bias : arrays.mask;
        values = values_for(c, what == 0 ? DType::kBFloat16 : DType::kBool, 0, 15);
        values.randomize(10, 1);
        for (std::int64_t j : {0, 77, 200, 299}) {
          values.fill([&](auto b, auto h, auto i, auto key) {
            const bool hides = key == j && (i + h) % 3 != 0;
            return hides ? (what == 0 ? -INFINITY : 0.0f) : values.at(b, h, i, key);
          });
          arrays.k.at(0, j, 1, 3) = bad;
          arrays.v.at(1, j, 0, 5) = bad;
        }
        check_case(c.named("non-finite, hidden"), arrays);
        if (what > 0) continue;
        const PairValues bias = values;
        arrays = make_arrays(c);
        arrays.bias = bias;
        arrays.bias.set(1, 2, c.Tq - 1, 100, bad);
        check_case(c.named("non-finite bias"), arrays);
      }
    }
  }
}

// Nor does what an earlier call has left in scratch, where tiles are skipped.
void test_scratch_of_hidden_tiles() {
  for (std::int64_t Tq : {1, 3, 90}) {
    const Case c = plain(Tq, 700).named("hidden tiles after infinite sums");
    Arrays arrays = make_arrays(c);
    arrays.mask = PairValues({1, 1, 1, c.Tk}, DType::kBool);
    arrays.mask.fill([](auto, auto, auto, auto j) { return j < 300 ? 0.0f : 1.0f; });
    Arrays infinite = make_arrays(c);
    infinite.v.fill(INFINITY);
    for (forge::CpuTarget target : forge::usable_cpu_targets()) {
      forge::set_num_threads(1);
      run_forward(c, infinite, target);
      check_against_oracle(c, arrays, run_forward(c, arrays, target), target);
    }
  }
}

// All of them together, rows and keys off every tile, keys shared out among tasks.
void test_together() {
  for (std::int64_t Tq : {2, 60, 200}) {
    for (std::int64_t Tk : {150, 1500}) {
      for (int bits = 0; bits < 16; ++bits) {
        Case c = plain(Tq, Tk);
        c.B = Tk == 1500 ? 1 : 2;
        c.hv = 33;
        c.softcap = bits & 1 ? 2 : 0;
        if (bits & 2) c.runs = random_runs(c, 11, Tk);
        Arrays arrays = make_arrays(c);
        arrays.sinks = PairValues({1, c.H, 1, 1}, DType::kBFloat16, 0, 3);
        arrays.sinks.randomize(12, 2);
        if (bits & 4) arrays.bias = values_for(c, DType::kFloat16, 0, bits & 8 ? 10 : 14);
        if (bits & 4) arrays.bias.randomize(13, 1);
        if (bits & 8) arrays.mask = values_for(c, DType::kBool, bits % 3, 13 - (bits & 4));
        if (bits & 8) arrays.mask.randomize(14, 3);
        check_case(c.named("together"), arrays);
        check_queries(c, arrays);
        check_groups_alone(c, arrays);
      }
    }
  }
}

}  // namespace

int main() {
  test_runs();
  test_unseen_keys();
  test_value_sizes();
  test_sinks();
  test_biases_and_masks();
  test_blocks_of_a_mask();
  test_non_finite();
  test_scratch_of_hidden_tiles();
  test_together();
  return test_result();
}
