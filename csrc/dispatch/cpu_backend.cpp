#include "dispatch/cpu_backend.h"

#include <algorithm>
#include <memory>

#include "core/cpu_target.h"
#include "core/thread_pool.h"
#include "reference/attention.h"

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

template <typename Real>
CpuTarget materialized_backward(const Problem& problem, const BackwardArrays<Real>& given,
                                bool accumulate, CpuTarget target) {
  const AttnParamsOf<double>& params = problem.params;
  const std::size_t rows = static_cast<std::size_t>(params.B * params.H * params.Tq);
  const std::unique_ptr<Real[]> d_row(new Real[rows]);
  BackwardArrays<Real> arrays = given;
  arrays.d_row = d_row.get();
  if (!accumulate) {
    fill_zero(arrays.dq, params.dq, params, params.Tq, params.H);
    fill_zero(arrays.dk, params.dk, params, params.Tk, params.Hkv);
    fill_zero(arrays.dv, params.dv, params, params.Tk, params.Hkv);
  }
  reference::attention_bwd_d(problem, arrays, target);
  reference::attention_bwd_dq(problem, arrays, target);
  return reference::attention_bwd_dkv(problem, arrays, target);
}

template <typename Real>
CpuTarget run_materialized(MaterializedKernel kernel, const Problem& problem,
                           const ForwardArrays<Real>& forward, const BackwardArrays<Real>& backward,
                           CpuTarget target) {
  switch (kernel) {
    case MaterializedKernel::kForward:
      return reference::attention_fwd(problem, forward, target);
    case MaterializedKernel::kBackwardD:
      return reference::attention_bwd_d(problem, backward, target);
    case MaterializedKernel::kBackwardDq:
      return reference::attention_bwd_dq(problem, backward, target);
    case MaterializedKernel::kBackwardDkv:
      break;
  }
  return reference::attention_bwd_dkv(problem, backward, target);
}

// Until the fused kernels are here, the fused family runs the materialized ones on a p of its own.
struct TemporaryProbs {
  std::unique_ptr<float[]> p;
  std::unique_ptr<float[]> stats;
  ForwardArrays<float> arrays;

  TemporaryProbs(const Problem& problem, ForwardArrays<float> given) : arrays(given) {
    const AttnParamsOf<double>& params = problem.params;
    const std::size_t rows = static_cast<std::size_t>(params.B * params.H * params.Tq);
    p.reset(new float[rows * static_cast<std::size_t>(params.Tk)]);
    arrays.p = p.get();
  }
};

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
    const CpuTarget target = choose_cpu_target(cpu_target);
    if (problem.family == Family::kFused) {
      TemporaryProbs temporary(problem, arrays.f32);
      return info(reference::attention_fwd(problem, temporary.arrays, target));
    }
    return run_kernel(MaterializedKernel::kForward, problem, arrays, {}, cpu_target);
  }

  RunInfo backward(const Problem& problem, const BackwardBuffers& arrays, bool accumulate,
                   const std::string& cpu_target) const override {
    const CpuTarget target = choose_cpu_target(cpu_target);
    if (problem.dtype == DType::kFloat64) {
      return info(materialized_backward(problem, arrays.f64, accumulate, target));
    }
    BackwardArrays<float> given = arrays.f32;
    if (problem.family == Family::kFused) {
      const AttnParamsOf<double>& params = problem.params;
      const std::size_t rows = static_cast<std::size_t>(params.B * params.H * params.Tq);
      const std::unique_ptr<float[]> o(new float[rows * static_cast<std::size_t>(params.hd)]);
      const std::unique_ptr<float[]> stats(new float[2 * rows]);
      Problem packed = problem;
      packed.params.o = {params.Tq * params.H * params.hd, params.H * params.hd, params.hd};
      TemporaryProbs temporary(
          packed, {given.q, given.k, given.v, o.get(), nullptr, {stats.get(), stats.get() + rows}});
      reference::attention_fwd(packed, temporary.arrays, target);
      given.p = temporary.p.get();
      return info(materialized_backward(problem, given, accumulate, target));
    }
    return info(materialized_backward(problem, given, accumulate, target));
  }

  RunInfo run_kernel(MaterializedKernel kernel, const Problem& problem,
                     const ForwardBuffers& forward, const BackwardBuffers& backward,
                     const std::string& cpu_target) const override {
    const CpuTarget target = choose_cpu_target(cpu_target);
    if (problem.dtype == DType::kFloat64) {
      return info(run_materialized(kernel, problem, forward.f64, backward.f64, target));
    }
    return info(run_materialized(kernel, problem, forward.f32, backward.f32, target));
  }

 private:
  static RunInfo info(CpuTarget target) {
    return {"cpu", "materialized", cpu_target_name(target), num_threads()};
  }
};

}  // namespace

const Backend& cpu_backend() {
  static const CpuBackend backend;
  return backend;
}

}  // namespace forge
