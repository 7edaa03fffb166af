// Attention problems for tests: their description, their arrays in any layout, and a float64 oracle
// that shares nothing with csrc.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/cpu_target.h"
#include "core/problem.h"
#include "cpu/attention.h"
#include "operand_of.h"
#include "pair_values.h"

namespace forge_test {

// Whether to run the next case: all of them, or every n-th where FORGE_TEST_CASE_STRIDE is n, for
// machines that would take too long, such as an emulated one.
inline bool takes_next_case() {
  static const char* const text = std::getenv("FORGE_TEST_CASE_STRIDE");
  static const long stride = text == nullptr ? 1 : std::max(1L, std::strtol(text, nullptr, 10));
  static long number = 0;
  return number++ % stride == 0;
}

// A window of -1 is unlimited; offsets, starts and ends empty: the defaults; runs: a range for each
// query instead; hv of 0: hd.
struct Case {
  std::string name;
  std::int64_t B = 1, Tq = 1, Tk = 1, H = 1, Hkv = 1, hd = 1, hv = 0;
  bool causal = false;
  std::int64_t window_left = -1, window_right = -1;
  double softcap = 0, scale = std::numeric_limits<double>::quiet_NaN();  // NaN: 1 / sqrt(hd)
  std::vector<std::int64_t> offsets, key_start, key_end;
  std::vector<forge::AttnRange> runs;  // [B, Tq]
  float q_size = 1;

  std::int64_t value_dim() const { return hv == 0 ? hd : hv; }

  float used_scale() const {
    return static_cast<float>(std::isnan(scale) ? 1 / std::sqrt(static_cast<double>(hd)) : scale);
  }
  std::int64_t offset(std::int64_t b) const {
    return offsets.empty() ? Tk - Tq : offsets[static_cast<std::size_t>(b) % offsets.size()];
  }
  std::int64_t start(std::int64_t b) const {
    return key_start.empty() ? 0 : key_start[static_cast<std::size_t>(b) % key_start.size()];
  }
  std::int64_t end(std::int64_t b) const {
    return key_end.empty() ? Tk : key_end[static_cast<std::size_t>(b) % key_end.size()];
  }
  forge::AttnRange range(std::int64_t b, std::int64_t i) const {
    if (runs.empty()) return {offset(b), start(b), end(b)};
    return runs[static_cast<std::size_t>(b * Tq + i)];
  }
  bool sees(std::int64_t b, std::int64_t i, std::int64_t j) const {
    const forge::AttnRange own = range(b, i);
    const std::int64_t position = i + own.query_offset;
    return j >= own.key_start && j < own.key_end && (!causal || j <= position) &&
           (window_left < 0 || j >= position - window_left) &&
           (window_right < 0 || j <= position + window_right);
  }
  // The case with a name that says what it is.
  Case named(const char* what) const {
    Case copy = *this;
    char text[256];
    std::snprintf(
        text, sizeof text, "%s B%d Tq%d Tk%d H%d/%d hd%d/%d causal%d window(%d,%d) cap%g size%g",
        what, static_cast<int>(B), static_cast<int>(Tq), static_cast<int>(Tk), static_cast<int>(H),
        static_cast<int>(Hkv), static_cast<int>(hd), static_cast<int>(value_dim()), causal,
        static_cast<int>(window_left), static_cast<int>(window_right), softcap, q_size);
    copy.name = text;
    return copy;
  }
};

constexpr int kLayouts = 6;

// A [B, T, heads, hd] array inside a buffer of NaN.
class Array {
 public:
  Array() = default;
  Array(std::int64_t B, std::int64_t T, std::int64_t heads, std::int64_t hd)
      : B_(B), T_(T), heads_(heads), hd_(hd) {
    relayout(0);
  }

  const float* base() const { return data_.data() + origin_; }
  float* base() { return data_.data() + origin_; }
  forge::Operand operand() const {
    forge::Operand operand = contiguous(base(), {B_, T_, heads_, hd_});
    operand.strides = {strides_.batch, strides_.row, strides_.head, 1};
    return operand;
  }
  float& at(std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t d) {
    return base()[forge::element_offset(strides_, b, t, h) + d];
  }
  float at(std::int64_t b, std::int64_t t, std::int64_t h, std::int64_t d) const {
    return base()[forge::element_offset(strides_, b, t, h) + d];
  }
  // The rows [first, T), in place of all.
  Array rows_from(std::int64_t first) const {
    Array copy = *this;
    copy.T_ -= first;
    copy.origin_ += first * strides_.row;
    return copy;
  }
  // One sequence and some heads, in place of all.
  Array part(std::int64_t b, std::int64_t head, std::int64_t heads) const {
    Array copy = *this;
    copy.B_ = 1;
    copy.heads_ = heads;
    copy.origin_ += b * strides_.batch + head * strides_.head;
    return copy;
  }
  template <typename Value>
  void set(Value value) {
    for (std::int64_t b = 0; b < B_; ++b)
      for (std::int64_t t = 0; t < T_; ++t)
        for (std::int64_t h = 0; h < heads_; ++h)
          for (std::int64_t d = 0; d < hd_; ++d) at(b, t, h, d) = value();
  }
  void fill(float x) {
    set([x] { return x; });
  }
  void randomize(unsigned seed, float size) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    set([&] { return size * normal(random); });
  }

  // 0: contiguous, its last row ends the buffer; 1: rows of a wider array; 2: heads before rows;
  // 3: rows backwards; 4: one row for all (stride 0); 5: everything backwards, gaps between heads.
  void relayout(int layout) {
    const std::int64_t gap = layout == 5 ? 3 : 0, head = hd_ + gap;
    strides_ = {T_ * heads_ * head, heads_ * head, head, 0};
    if (layout == 1) strides_ = {T_ * (heads_ * hd_ + 7), heads_ * hd_ + 7, hd_, 0};
    if (layout == 2) strides_ = {heads_ * T_ * hd_, hd_, T_ * hd_, 0};
    std::int64_t size = B_ * T_ * heads_ * head + (layout == 1 ? B_ * T_ * 7 : 0);
    origin_ = 0;
    if (layout == 3 || layout == 5) origin_ += (T_ - 1) * strides_.row, strides_.row *= -1;
    if (layout == 5) {
      origin_ += (heads_ - 1) * strides_.head + (B_ - 1) * strides_.batch;
      strides_.head *= -1;
      strides_.batch *= -1;
    }
    if (layout == 4) strides_.row = 0;
    data_.assign(static_cast<std::size_t>(size), std::numeric_limits<float>::quiet_NaN());
    randomize(static_cast<unsigned>(layout + 17), 1);
  }

 private:
  std::int64_t B_ = 0, T_ = 0, heads_ = 0, hd_ = 0, origin_ = 0;
  forge::AttnStrides strides_{};
  std::vector<float> data_;
};

struct Arrays {
  Array q, k, v;
  PairValues bias, mask, sinks;  // [B|1, H|1, Tq|1, Tk|1]; sinks without the last axis

  // Whether neither bias nor mask hides a pair.
  bool shows(std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t j) const {
    if (mask.given() && mask.at(b, h, i, j) == 0) return false;
    return !bias.given() || bias.at(b, h, i, j) != -INFINITY;
  }
};

inline Arrays make_arrays(const Case& c) {
  Arrays arrays = {Array(c.B, c.Tq, c.H, c.hd),
                   Array(c.B, c.Tk, c.Hkv, c.hd),
                   Array(c.B, c.Tk, c.Hkv, c.value_dim()),
                   {},
                   {},
                   {}};
  arrays.q.randomize(1, c.q_size);
  arrays.k.randomize(2, 1);
  arrays.v.randomize(3, 1);
  return arrays;
}

// What is written is contiguous, and for the caller to give.
inline forge::Problem problem_of(const Case& c, const Arrays& arrays) {
  forge::Problem p;
  p.B = c.B;
  p.Tq = c.Tq;
  p.Tk = c.Tk;
  p.H = static_cast<std::int32_t>(c.H);
  p.Hkv = static_cast<std::int32_t>(c.Hkv);
  p.hd = static_cast<std::int32_t>(c.hd);
  p.hv = static_cast<std::int32_t>(c.value_dim());
  p.causal = c.causal;
  p.window_left = c.window_left;
  p.window_right = c.window_right;
  p.scale = c.used_scale();
  p.softcap = c.softcap;
  p.operands[forge::kBufferQ] = arrays.q.operand();
  p.operands[forge::kBufferK] = arrays.k.operand();
  p.operands[forge::kBufferV] = arrays.v.operand();
  if (arrays.bias.given()) p.operands[forge::kBufferBias] = arrays.bias.operand();
  if (arrays.mask.given()) p.operands[forge::kBufferMask] = arrays.mask.operand();
  if (arrays.sinks.given()) p.operands[forge::kBufferSinks] = arrays.sinks.operand();
  p.runs = !c.runs.empty();
  p.ranges = c.runs;
  for (std::int64_t b = 0; b < c.B && !p.runs; ++b) p.ranges.push_back(c.range(b, 0));
  return p;
}

struct ForwardResult {
  std::vector<float> o, row_max, row_sum;  // o: [B, Tq, H, hd] contiguous
};

// Every element is written to.
inline ForwardResult run_forward(const Case& c, const Arrays& arrays, forge::CpuTarget target) {
  ForwardResult result;
  const float unset = 12345.0f;
  result.o.assign(static_cast<std::size_t>(c.B * c.Tq * c.H * c.value_dim()), unset);
  result.row_max.assign(static_cast<std::size_t>(c.B * c.H * c.Tq), unset);
  result.row_sum = result.row_max;
  forge::Problem problem = problem_of(c, arrays);
  give(problem, forge::kBufferO, result.o);
  give(problem, forge::kBufferRowMax, result.row_max);
  give(problem, forge::kBufferRowSum, result.row_sum);
  forge::cpu::attention_fwd(problem, target);
  return result;
}

struct OracleRow {
  bool live;           // sees a key whose score is not -inf
  double m, l;         // with the sink
  double score_error;  // a bound on the float32 error of a score
  double value_size;   // largest |v| seen, at least 1
};

// Row (b, h, i) of the forward in float64; o has as many elements as a value.
inline OracleRow oracle_row(const Case& c, const Arrays& arrays, std::int64_t b, std::int64_t h,
                            std::int64_t i, double* o) {
  const std::int64_t g = h / (c.H / c.Hkv);
  const std::int64_t hv = c.value_dim();
  OracleRow row = {false, -INFINITY, 0, 0, 1};
  std::vector<double> s(static_cast<std::size_t>(c.Tk));
  for (std::int64_t j = 0; j < c.Tk; ++j) {
    if (!c.sees(b, i, j) || !arrays.shows(b, h, i, j)) continue;
    double x = 0, size = 0;
    for (std::int64_t d = 0; d < c.hd; ++d) {
      const double term = static_cast<double>(arrays.q.at(b, i, h, d)) * arrays.k.at(b, j, g, d);
      x += term;
      size += std::fabs(term);
    }
    x *= c.used_scale();
    double last = std::fabs(x);
    if (c.softcap > 0) x = c.softcap * std::tanh(x / c.softcap);
    if (arrays.bias.given()) {
      x += arrays.bias.at(b, h, i, j);
      last += std::fabs(x);
    }
    row.live = row.live || x != -INFINITY;
    s[static_cast<std::size_t>(j)] = x;
    if (x > row.m) row.m = x;
    const double error =
        (size * std::fabs(c.used_scale()) * std::sqrt(c.hd + 4.0) + 4 * last) * 0x1p-24;
    if (std::isfinite(error) && error > row.score_error) row.score_error = error;
  }
  for (std::int64_t d = 0; d < hv; ++d) o[d] = 0;
  const double sink = arrays.sinks.given() ? arrays.sinks.at(b, h, i) : -INFINITY;
  if (!row.live) {
    if (sink != -INFINITY) row.m = sink, row.l = 1;
    return row;
  }
  if (!(sink <= row.m)) row.m = sink;  // NaN too
  if (sink != -INFINITY) row.l = std::exp(sink - row.m);
  for (std::int64_t j = 0; j < c.Tk; ++j) {
    if (!c.sees(b, i, j) || !arrays.shows(b, h, i, j)) continue;
    // p below the smallest normal float counts as 0, as the kernels have it
    double p = std::exp(s[static_cast<std::size_t>(j)] - row.m);
    if (p < 0x1p-126) p = 0;
    row.l += p;
    for (std::int64_t d = 0; d < hv; ++d) {
      const double v = arrays.v.at(b, j, g, d);
      o[d] += p * v;
      if (std::isfinite(v) && std::fabs(v) > row.value_size) row.value_size = std::fabs(v);
    }
  }
  for (std::int64_t d = 0; d < hv; ++d) o[d] /= row.l;
  return row;
}

}  // namespace forge_test
