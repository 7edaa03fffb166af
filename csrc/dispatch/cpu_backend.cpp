#include "dispatch/cpu_backend.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <type_traits>

#include "core/cpu_target.h"
#include "core/thread_pool.h"
#include "cpu/attention.h"
#include "materialized/attention.h"

namespace forge {
namespace {

constexpr Int32 kMaxFusedHeadDim = 512;

// Zeroes a strided [B, T, heads, hd] output.
template <typename Real>
void fill_zero(Real* data, const AttnStrides& strides, const AttnParamsOf<double>& params,
               std::int64_t T, std::int64_t heads) {
  for (std::int64_t b = 0; b < params.B; ++b) {
    for (std::int64_t t = 0; t < T; ++t) {
      for (std::int64_t h = 0; h < heads; ++h) {
        std::fill_n(data + element_offset(strides, b, t, h), params.hd, Real(0));
      }
    }
  }
}

// Neither queries nor keys: the tiled kernels and their schedules are not asked to divide by that.
bool nothing_to_see(const AttnParamsOf<double>& params) {
  return params.B == 0 || params.Tq == 0 || params.Tk == 0;
}

// Without keys every row is dead.
void forward_of_nothing(const Problem& problem, const ForwardArrays<float>& arrays) {
  const AttnParamsOf<double>& params = problem.params;
  const std::int64_t rows = params.B * params.H * params.Tq;
  fill_zero(arrays.o, params.o, params, params.Tq, params.H);
  std::fill_n(arrays.stats.row_max, rows, -std::numeric_limits<float>::infinity());
  std::fill_n(arrays.stats.row_sum, rows, 0.0f);
}

template <typename Real>
void zero_gradients(const Problem& problem, const BackwardArrays<Real>& arrays) {
  const AttnParamsOf<double>& params = problem.params;
  fill_zero(arrays.dq, params.dq, params, params.Tq, params.H);
  fill_zero(arrays.dk, params.dk, params, params.Tk, params.Hkv);
  fill_zero(arrays.dv, params.dv, params, params.Tk, params.Hkv);
}

template <typename Real>
CpuTarget materialized_backward(const Problem& problem, const BackwardArrays<Real>& arrays,
                                bool accumulate, CpuTarget target) {
  if (!accumulate) zero_gradients(problem, arrays);
  materialized::attention_bwd_d(problem, arrays, target);
  materialized::attention_bwd_dq(problem, arrays, target);
  return materialized::attention_bwd_dkv(problem, arrays, target);
}

// The whole backward; the materialized kernels hand d_row on in memory of their own.
template <typename Real>
CpuTarget backward_of(const Problem& problem, BackwardArrays<Real> arrays, bool accumulate,
                      CpuTarget target) {
  const AttnParamsOf<double>& params = problem.params;
  if constexpr (std::is_same_v<Real, float>) {
    if (problem.family == Family::kFused) {
      if (!nothing_to_see(params)) {
        cpu::attention_bwd(problem, arrays, accumulate, target);
      } else if (!accumulate) {
        zero_gradients(problem, arrays);
      }
      return target;
    }
  }
  const std::unique_ptr<Real[]> d_row(
      new Real[static_cast<std::size_t>(params.B * params.H * params.Tq)]);
  arrays.d_row = d_row.get();
  return materialized_backward(problem, arrays, accumulate, target);
}

CpuTarget run_backward_kernel(BackwardKernel kernel, const Problem& problem,
                              const BackwardArrays<float>& arrays, CpuTarget target) {
  switch (kernel) {
    case BackwardKernel::kD:
      return materialized::attention_bwd_d(problem, arrays, target);
    case BackwardKernel::kDq:
      return materialized::attention_bwd_dq(problem, arrays, target);
    case BackwardKernel::kDkv:
      break;
  }
  return materialized::attention_bwd_dkv(problem, arrays, target);
}

class CpuBackend final : public Backend {
 public:
  const char* name() const override { return "cpu"; }
  Support available() const override { return {true, ""}; }

  Support supports(const Problem& problem) const override {
    if (problem.family == Family::kMaterialized) return {true, ""};
    if (problem.dtype == DType::kFloat64) {
      return {false, "float64 needs kernel='materialized'; the fused kernels take float32"};
    }
    if (problem.params.hd > kMaxFusedHeadDim) {
      return {false, "the fused kernels take head dims 1 to " + std::to_string(kMaxFusedHeadDim) +
                         ", got " + std::to_string(problem.params.hd)};
    }
    return {true, ""};
  }

  RunInfo forward(const Problem& problem, const ForwardBuffers& arrays,
                  const std::string& cpu_target) const override {
    CpuTarget target = choose_cpu_target(cpu_target);
    if (problem.dtype == DType::kFloat64) {
      target = materialized::attention_fwd(problem, arrays.f64, target);
    } else if (problem.family == Family::kMaterialized) {
      target = materialized::attention_fwd(problem, arrays.f32, target);
    } else if (nothing_to_see(problem.params)) {
      forward_of_nothing(problem, arrays.f32);
    } else {
      cpu::attention_fwd(problem, arrays.f32, target);
    }
    return info(problem.family, target);
  }

  RunInfo backward(const Problem& problem, const BackwardBuffers& arrays, bool accumulate,
                   const std::string& cpu_target) const override {
    const CpuTarget target = choose_cpu_target(cpu_target);
    if (problem.dtype == DType::kFloat64) {
      return info(problem.family, backward_of(problem, arrays.f64, accumulate, target));
    }
    return info(problem.family, backward_of(problem, arrays.f32, accumulate, target));
  }

  RunInfo run_kernel(BackwardKernel kernel, const Problem& problem, const BackwardBuffers& arrays,
                     const std::string& cpu_target) const override {
    const CpuTarget target = choose_cpu_target(cpu_target);
    return info(problem.family, run_backward_kernel(kernel, problem, arrays.f32, target));
  }

 private:
  static RunInfo info(Family family, CpuTarget target) {
    RunInfo info;
    info.backend = "cpu";
    info.kernel = family_name(family);
    info.cpu_target = cpu_target_name(target);
    info.threads = num_threads();
    return info;
  }
};

}  // namespace

const Backend& cpu_backend() {
  static const CpuBackend backend;
  return backend;
}

}  // namespace forge
