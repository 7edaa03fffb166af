// Where dbias is summed, and what remains to be done of it once all blocks are through.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>

#include "cpu/backward/axis_sums.h"
#include "cpu/rows.h"

namespace forge::cpu {

class BiasGradient {
 public:
  // Takes its memory, if dbias is asked for.
  explicit BiasGradient(const BackwardProblem& problem)
      : params_(problem.params),
        dbias_(problem.arrays.dbias),
        accumulate_(problem.accumulate),
        axes_(axes_of(problem)),
        in_place_(axes_ == BiasAxes::kPairs && !is_half(dbias_.dtype)),
        count_(in_place_ || axes_ == BiasAxes::kNone ? 0 : elements_of_sum()),
        scratch_(count_ == 0 ? nullptr : new float[static_cast<std::size_t>(count_)]) {}

  // Zeros, unless dbias is added to where it is.
  BiasSum begin() const {
    if (in_place_ && !accumulate_) zero_pairs();
    if (count_ > 0) zero_scratch();
    BiasSum sum = {axes_, in_place_ ? elements<float>(dbias_) : scratch_.get(), {}};
    const Int64 H = params_.H;
    if (axes_ == BiasAxes::kColumns) sum.strides = {H * params_.Tk, params_.Tk, 0};
    if (axes_ == BiasAxes::kRows) sum.strides = {H * params_.Tq, params_.Tq, 1};
    if (axes_ == BiasAxes::kPairs) sum.strides = pair_strides();
    return sum;
  }

  // Whether the rows of all heads of a group add to the same elements.
  bool adds_up_group() const {
    return axes_ == BiasAxes::kPairs && dbias_.shape[1] == 1 && params_.H > params_.Hkv;
  }
  BiasAxes axes() const { return axes_; }

  // The kv head before `group` that adds to the same elements, or -1.
  Int64 group_before(Int64 group) const {
    if (axes_ != BiasAxes::kPairs) return -1;
    const KvHead at = kv_head_at(params_, group);
    if (dbias_.shape[1] == 1 && at.head > 0) return group - 1;
    if (dbias_.shape[0] > 1 || at.b == 0) return -1;
    return dbias_.shape[1] == 1 ? group - 1 : group - params_.Hkv;
  }

  void finish(const BackwardKernels& kernels) const {
    const auto& [s0, s1, s2, s3] = dbias_.strides;
    const auto& [B, H, Tq, Tk] = dbias_.shape;
    if (axes_ == BiasAxes::kColumns) {
      const SomeAxes to = {dbias_, {B, H, Tk}, {s0, s1, s3}};
      add_up_axes(kernels, scratch_.get(), {params_.B, params_.H, params_.Tk}, to, accumulate_);
    } else if (axes_ == BiasAxes::kRows) {
      const SomeAxes to = {dbias_, {B, H, Tq}, {s0, s1, s2}};
      add_up_axes(kernels, scratch_.get(), {params_.B, params_.H, params_.Tq}, to, accumulate_);
    } else if (axes_ == BiasAxes::kPairs && !in_place_) {
      round_pairs(kernels);
    }
  }

 private:
  static BiasAxes axes_of(const BackwardProblem& problem) {
    const Operand& dbias = problem.arrays.dbias;
    if (!dbias.data || is_empty(dbias)) return BiasAxes::kNone;
    if (dbias.shape[2] == 1 && problem.params.Tq > 1) return BiasAxes::kColumns;
    if (dbias.shape[3] == 1 && problem.params.Tk > 1) return BiasAxes::kRows;
    return BiasAxes::kPairs;
  }

  Int64 elements_of_sum() const {
    if (axes_ == BiasAxes::kColumns) return params_.B * params_.H * params_.Tk;
    if (axes_ == BiasAxes::kRows) return params_.B * params_.H * params_.Tq;
    return dbias_.shape[0] * dbias_.shape[1] * dbias_.shape[2] * dbias_.shape[3];
  }

  std::array<Int64, 3> pair_strides() const {
    const auto& [s0, s1, s2, s3] = dbias_.strides;
    if (in_place_) return {s0, s1, s2};
    const auto& [B, H, Tq, Tk] = dbias_.shape;
    return {B == 1 ? 0 : H * Tq * Tk, H == 1 ? 0 : Tq * Tk, Tk};
  }

  // Rows of dbias, of Tk elements each.
  Int64 rows() const { return dbias_.shape[0] * dbias_.shape[1] * dbias_.shape[2]; }
  StridedElements row_of_dbias(Int64 row) const {
    const auto& strides = dbias_.strides;
    const Int64 H = dbias_.shape[1], Tq = dbias_.shape[2];
    const Int64 at =
        row / (H * Tq) * strides[0] + row / Tq % H * strides[1] + row % Tq * strides[2];
    return {static_cast<char*>(dbias_.data) + at * dtype_bytes(dbias_.dtype), dbias_.dtype,
            strides[3]};
  }

  // As many bytes as Tq Tk: all threads take their share of the memory's pages.
  void zero_pairs() const {
    const auto bytes = static_cast<std::size_t>(dbias_.shape[3] * dtype_bytes(dbias_.dtype));
    parallel_for(rows(), [&](std::int64_t row, int) {
      std::memset(row_of_dbias(row).data, 0, bytes);  // of unit stride, as all that is written
    });
  }
  void zero_scratch() const {
    constexpr Int64 kAtOnce = 1 << 16;
    parallel_for((count_ + kAtOnce - 1) / kAtOnce, [&](std::int64_t part, int) {
      const Int64 begin = part * kAtOnce;
      std::fill_n(scratch_.get() + begin, std::min(kAtOnce, count_ - begin), 0.0f);
    });
  }

  void round_pairs(const BackwardKernels& kernels) const {
    const Int64 Tk = dbias_.shape[3];
    parallel_for(rows(), [&](std::int64_t row, int) {
      kernels.store_elements(row_of_dbias(row), scratch_.get() + row * Tk, Tk, accumulate_);
    });
  }

  const AttnParams& params_;
  const Operand& dbias_;
  const bool accumulate_;
  const BiasAxes axes_;
  const bool in_place_;
  const Int64 count_;
  const std::unique_ptr<float[]> scratch_;
};

}  // namespace forge::cpu
