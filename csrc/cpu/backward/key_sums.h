// Where dk and dv are summed: in the outputs, or, where these are of halves, in float32 scratch of
// the call, which is rounded once at the end.
#pragma once

#include "core/thread_pool.h"
#include "cpu/backward/kernel.h"

namespace forge::cpu {

// Scratch that a gradient takes.
inline Int64 key_sum_bytes(const BackwardProblem& problem, const Operand& gradient) {
  const AttnParams& params = problem.params;
  const Int64 floats = params.B * params.Tk * params.Hkv * params.hd;
  return is_half(gradient.dtype) ? floats * static_cast<Int64>(sizeof(float)) : 0;
}

inline GradientSum key_sum_of(const BackwardProblem& problem, const Operand& gradient,
                              char* scratch) {
  if (!is_half(gradient.dtype)) {
    return {elements<float>(gradient), gradient.heads_strides(), problem.accumulate};
  }
  const Int64 row = problem.params.Hkv * problem.params.hd;
  const AttnStrides strides = {problem.params.Tk * row, row, problem.params.hd, 0};
  return {reinterpret_cast<float*>(scratch), strides, false};
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
