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

template <typename Real>
CpuTarget run_in(const Problem& problem, CpuTarget target) {
  const auto params = params_as<Real>(problem);
  const Choice<Real> choice = choose<Real>(target);
  Operands operands = problem.operands;
  const auto run = [&](typename Kernels<Real>::Fn kernel, std::int64_t rows) {
    for_rows(rows, [&](std::int64_t begin, std::int64_t end) {
      kernel(params, problem.ranges.data(), operands, begin, end);
    });
  };
  const std::int64_t query_rows = params.B * params.H * params.Tq;
  const std::int64_t key_rows = params.B * params.Hkv * params.Tk;
  const Kernels<Real>& kernels = choice.kernels;
  switch (problem.pass) {
    case Pass::kForward:
      run(kernels.fwd, query_rows);
      break;
    case Pass::kBackward: {
      const std::unique_ptr<Real[]> d_row(new Real[static_cast<std::size_t>(query_rows)]);
      operands[kBufferDRow].data = d_row.get();
      if (!problem.accumulate) zero_gradients(problem);
      run(kernels.bwd_d, query_rows);
      run(kernels.bwd_dq, query_rows);
      run(kernels.bwd_dkv, key_rows);
      const auto rows_of = [&](const Operand& some) {
        return some.shape[0] * some.shape[1] * some.shape[2];
      };
      const Operand &dbias = operands[kBufferDbias], &dsinks = operands[kBufferDsinks];
      if (dbias.data != nullptr) run(kernels.bwd_dbias, rows_of(dbias));
      if (dsinks.data != nullptr) run(kernels.bwd_dsinks, rows_of(dsinks));
      break;
    }
    case Pass::kBwdD:
      run(kernels.bwd_d, query_rows);
      break;
    case Pass::kBwdDq:
      run(kernels.bwd_dq, query_rows);
      break;
    case Pass::kBwdDkv:
      run(kernels.bwd_dkv, key_rows);
      break;
  }
  return choice.target;
}

}  // namespace

CpuTarget run(const Problem& problem, CpuTarget target) {
  if (problem.dtype == DType::kFloat64) return run_in<double>(problem, target);
  return run_in<float>(problem, target);
}

}  // namespace forge::materialized
