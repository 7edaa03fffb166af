// The fused forward against a float64 oracle that shares nothing with it: shapes off every tile,
// all options, strides, NaN and infinity, dead rows; the same bits at any thread count.
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "attention_cases.h"
#include "check.h"
#include "cpu/attention.h"
#include "forward_checks.h"

namespace {

using forge::CpuTarget;
using namespace forge_test;

void test_shapes() {
  for (std::int64_t T : {1, 2, 7, 31, 33, 63, 64, 65, 127, 129, 193, 257, 300}) {
    Case c;
    c.Tq = c.Tk = T;
    c.H = 2;
    c.Hkv = 1;
    c.hd = 64;
    check_case(c.named("full"));
    c.causal = true;
    check_case(c.named("causal"));
  }
  for (std::int64_t hd :
       {1, 2, 3, 5, 6, 7, 8, 15, 16, 17, 31, 33, 40, 65, 80, 96, 127, 129, 257, 512}) {
    Case c;
    c.Tq = 37;
    c.Tk = 141;
    c.H = 3;
    c.Hkv = 3;
    c.hd = hd;
    c.causal = true;
    check_case(c.named("head size"));
  }
  for (std::int64_t Tq : {1, 2, 3, 5, 8, 9, 40}) {
    for (std::int64_t Tk : {0, 1, 5, 130, 1000, 3001}) {
      Case c;
      c.Tq = Tq;
      c.Tk = Tk;
      c.H = 6;
      c.Hkv = Tk == 1000 ? 6 : 2;
      c.hd = 24;
      c.B = 2;
      c.causal = true;
      check_case(c.named("Tq != Tk"));
      c.causal = false;
      check_case(c.named("Tq != Tk, full"));
    }
  }
}

// More unfinished rows than there is room for at once.
void test_many_sequences() {
  Case c;
  c.B = 300;
  c.Tq = 1;
  c.Tk = 130;
  c.H = 16;
  c.Hkv = 2;
  c.hd = 250;
  c.causal = true;
  c.key_end = {130, 7, 64, 0, 129};
  check_case(c.named("many sequences"));
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
    check_case(c.named("options"));
    c.Tq = 3;
    check_case(c.named("options, few queries"));
  }
  for (std::int64_t left : {0, 1, 62, 63, 64, 126, 127, 128, 131, 132}) {
    Case c;
    c.Tq = c.Tk = 640;
    c.hd = 4;
    c.causal = true;
    c.window_left = left;
    check_case(c.named("window"));
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
    check_case(c.named("large scores"));
    c.softcap = 30;
    check_case(c.named("large scores, capped"));
    c.softcap = 0;
  }
  // Equal scores of +-1e9, which float32 holds exactly: o is the mean of the values, l counts the
  // keys.
  for (float q : {1e9f, -1e9f}) {
    c.hd = 1;
    c.scale = 1;
    Arrays arrays = make_arrays(c);
    arrays.q.fill(q);
    arrays.k.fill(1);
    for (CpuTarget target : forge::usable_cpu_targets()) {
      const ForwardResult got = run_forward(c, arrays, target);
      for (std::int64_t i = 0; i < c.Tq; ++i) {
        CHECK(got.row_max[static_cast<std::size_t>(i)] == q);
        CHECK(got.row_sum[static_cast<std::size_t>(i)] == static_cast<float>(i + 1));
      }
    }
    check_case(c.named("equal huge scores"), arrays);
  }
  // (b) of the finite stand-ins for -inf: a score below half of the largest float.
  Case low;
  low.Tq = low.Tk = 2;
  low.hd = 1;
  low.scale = 1;
  Arrays arrays = make_arrays(low);
  arrays.q.fill(1e19f);
  arrays.k.fill(-2e19f);
  check_case(low.named("score of -2e38"), arrays);
}

void test_strides() {
  for (int layout = 0; layout < kLayouts; ++layout) {
    for (int which = 0; which < 3; ++which) {
      for (std::int64_t Tq : {2, 45}) {
        Case c;
        c.B = 2;
        c.Tq = Tq;
        c.Tk = 45;
        c.H = 4;
        c.Hkv = 2;
        c.hd = 19;
        c.causal = true;
        Arrays arrays = make_arrays(c);
        (which == 0 ? arrays.q : which == 1 ? arrays.k : arrays.v).relayout(layout);
        check_case(c.named("strides"), arrays);
      }
    }
  }
}

void test_non_finite() {
  const float nan = NAN, inf = INFINITY;
  for (std::int64_t Tq : {4, 150}) {
    for (float bad : {nan, inf, -inf}) {
      for (std::int64_t row : {0, 5, 60, 149}) {
        Case c;
        c.Tq = Tq;
        c.Tk = 150;
        c.H = 2;
        c.Hkv = 1;
        c.hd = 12;
        c.causal = true;
        c.window_left = 70;
        Arrays arrays = make_arrays(c);
        arrays.v.at(0, row, 0, 3) = bad;
        check_case(c.named("non-finite v"), arrays);
        arrays = make_arrays(c);
        arrays.k.at(0, row, 0, 3) = bad;
        check_case(c.named("non-finite k"), arrays);
        arrays = make_arrays(c);
        arrays.q.at(0, row % Tq, 1, 3) = bad;
        check_case(c.named("non-finite q"), arrays);
      }
    }
  }
  // Scores of -inf first, finite ones later, in other tiles; and nothing but -inf.
  for (std::int64_t Tq : {1, 40}) {
    Case c;
    c.Tq = Tq;
    c.Tk = 600;
    c.hd = 4;
    c.scale = 1;
    Arrays arrays = make_arrays(c);
    arrays.q.fill(1);
    for (std::int64_t j = 0; j < 400; ++j) arrays.k.at(0, j, 0, 1) = -inf;
    check_case(c.named("-inf, then finite"), arrays);
    for (std::int64_t j = 0; j < 600; ++j) arrays.k.at(0, j, 0, 1) = -inf;
    check_case(c.named("nothing but -inf"), arrays);
    c.causal = true;
    c.offsets = {-20};
    check_case(c.named("nothing but -inf, dead rows"), arrays);
  }
}

}  // namespace

int main() {
  test_shapes();
  test_many_sequences();
  test_options();
  test_extreme_scores();
  test_strides();
  test_non_finite();
  return test_result();
}
