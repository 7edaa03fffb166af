// Where dk and dv are summed: in the outputs, or, where these are of halves, in float32 scratch of
// the call, which is rounded once at the end.
#pragma once

#include <algorithm>

#include "core/thread_pool.h"
#include "cpu/backward/kernel.h"

namespace forge::cpu {

// Scratch that a gradient takes.
inline Int64 key_sum_bytes(const Operand& gradient) {
  const auto& [B, Tk, heads, channels] = gradient.shape;
  const Int64 floats = B * Tk * heads * channels;
  return is_half(gradient.dtype) ? floats * static_cast<Int64>(sizeof(float)) : 0;
}

inline GradientSum key_sum_of(const BackwardProblem& problem, const Operand& gradient,
                              char* scratch) {
  if (!is_half(gradient.dtype)) {
    return {elements<float>(gradient), gradient.heads_strides(), gradient.shape[3],
            problem.accumulate};
  }
  const auto& [B, Tk, heads, channels] = gradient.shape;
  const AttnStrides strides = {Tk * heads * channels, heads * channels, channels, 0};
  return {reinterpret_cast<float*>(scratch), strides, channels, false};
}

// Zeros for some keys of a kv head, unless what is there stays.
inline void clear_keys(const GradientSum& sum, Int64 b, Int64 kv_head, IndexRange keys) {
  if (sum.add) return;
  for (Int64 j = keys.begin; j < keys.end; ++j) {
    std::fill_n(sum.data + element_offset(sum.strides, b, j, kv_head), sum.channels, 0.0f);
  }
}

inline void round_key_sum(const BackwardProblem& problem, const BackwardKernels& kernels,
                          const Operand& gradient, const GradientSum& sum) {
  if (!is_half(gradient.dtype)) return;
  const Int64 Tk = problem.params.Tk;
  parallel_for(problem.params.B * Tk, [&](std::int64_t row, int) {
    kernels.store_key(gradient, sum.data, row / Tk, row % Tk, problem.accumulate);
  });
}

}  // namespace forge::cpu
