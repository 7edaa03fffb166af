#include "materialized/attention.h"

#include <algorithm>
#include <memory>
#include <type_traits>

#include "core/stop.h"
#include "core/thread_pool.h"
#include "core/zero_fill.h"
#include "materialized/kernels.h"

namespace forge::materialized {
namespace {

constexpr std::int64_t kRowsPerTask = 8;

template <typename Real>
struct Choice {
  const Kernels<Real>& kernels;
  CpuTarget target;
};

// Every target above the baseline runs the hardware-fma build; there is nothing else to gain here.
template <typename Real>
Choice<Real> choose(CpuTarget target) {
  constexpr bool f32 = std::is_same_v<Real, float>;
#if defined(__x86_64__)
  if (target != CpuTarget::kBaseline) {
    if constexpr (f32) return {avx2::kKernelsF32, CpuTarget::kAvx2};
    if constexpr (!f32) return {avx2::kKernelsF64, CpuTarget::kAvx2};
  }
#endif
  if constexpr (f32) return {baseline::kKernelsF32, target};
  if constexpr (!f32) return {baseline::kKernelsF64, target};
}

template <typename Rows>
void for_rows(std::int64_t rows, Rows&& run) {
  const std::int64_t tasks = ceil_div(rows, kRowsPerTask);
  parallel_for(tasks, [&](std::int64_t task, int) {
    const std::int64_t end = std::min(rows, (task + 1) * kRowsPerTask);
    for (std::int64_t row = task * kRowsPerTask; row < end; ++row) {
      if (stop_requested()) return;  // a row may take milliseconds
      run(row, row + 1);
    }
  });
}

}  // namespace

template <typename Real>
CpuTarget attention_fwd(const Problem& problem, const ForwardArrays<Real>& arrays,
                        CpuTarget target) {
  const auto params = params_as<Real>(problem);
  const Choice<Real> choice = choose<Real>(target);
  for_rows(params.B * params.H * params.Tq, [&](std::int64_t begin, std::int64_t end) {
    choice.kernels.fwd(params, problem.ranges.data(), arrays, begin, end);
  });
  return choice.target;
}

template <typename Real>
CpuTarget attention_bwd_d(const Problem& problem, const BackwardArrays<Real>& arrays,
                          CpuTarget target) {
  const auto params = params_as<Real>(problem);
  const Choice<Real> choice = choose<Real>(target);
  for_rows(params.B * params.H * params.Tq, [&](std::int64_t begin, std::int64_t end) {
    choice.kernels.bwd_d(params, arrays, begin, end);
  });
  return choice.target;
}

template <typename Real>
CpuTarget attention_bwd_dq(const Problem& problem, const BackwardArrays<Real>& arrays,
                           CpuTarget target) {
  const auto params = params_as<Real>(problem);
  const Choice<Real> choice = choose<Real>(target);
  for_rows(params.B * params.H * params.Tq, [&](std::int64_t begin, std::int64_t end) {
    choice.kernels.bwd_dq(params, problem.ranges.data(), arrays, begin, end);
  });
  return choice.target;
}

template <typename Real>
CpuTarget attention_bwd_dkv(const Problem& problem, const BackwardArrays<Real>& arrays,
                            CpuTarget target) {
  const auto params = params_as<Real>(problem);
  const Choice<Real> choice = choose<Real>(target);
  for_rows(params.B * params.Hkv * params.Tk, [&](std::int64_t begin, std::int64_t end) {
    choice.kernels.bwd_dkv(params, problem.ranges.data(), arrays, begin, end);
  });
  return choice.target;
}

template <typename Real>
CpuTarget attention_bwd(const Problem& problem, const BackwardArrays<Real>& arrays, bool accumulate,
                        CpuTarget target) {
  const AttnParamsOf<double>& params = problem.params;
  const std::unique_ptr<Real[]> d_row(
      new Real[static_cast<std::size_t>(params.B * params.H * params.Tq)]);
  BackwardArrays<Real> all = arrays;
  all.d_row = d_row.get();
  if (!accumulate) zero_gradients(problem, all);
  attention_bwd_d(problem, all, target);
  attention_bwd_dq(problem, all, target);
  return attention_bwd_dkv(problem, all, target);
}

#define FORGE_INSTANTIATE(Real)                                                                   \
  template CpuTarget attention_fwd(const Problem&, const ForwardArrays<Real>&, CpuTarget);        \
  template CpuTarget attention_bwd(const Problem&, const BackwardArrays<Real>&, bool, CpuTarget); \
  template CpuTarget attention_bwd_d(const Problem&, const BackwardArrays<Real>&, CpuTarget);     \
  template CpuTarget attention_bwd_dq(const Problem&, const BackwardArrays<Real>&, CpuTarget);    \
  template CpuTarget attention_bwd_dkv(const Problem&, const BackwardArrays<Real>&, CpuTarget);
FORGE_INSTANTIATE(float)
FORGE_INSTANTIATE(double)
#undef FORGE_INSTANTIATE

}  // namespace forge::materialized
