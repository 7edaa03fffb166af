#include "dispatch/cpu_backend.h"

#include "core/cpu_target.h"
#include "core/thread_pool.h"
#include "cpu/attention.h"
#include "materialized/attention.h"

namespace forge {
namespace {

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
    if (problem.params.hd > cpu::kMaxHeadDim) {
      return {false, "the fused kernels take head dims 1 to " + std::to_string(cpu::kMaxHeadDim) +
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
    } else {
      cpu::attention_fwd(problem, arrays.f32, target);
    }
    return info(problem.family, target);
  }

  RunInfo backward(const Problem& problem, const BackwardBuffers& arrays, bool accumulate,
                   const std::string& cpu_target) const override {
    CpuTarget target = choose_cpu_target(cpu_target);
    if (problem.dtype == DType::kFloat64) {
      target = materialized::attention_bwd(problem, arrays.f64, accumulate, target);
    } else if (problem.family == Family::kMaterialized) {
      target = materialized::attention_bwd(problem, arrays.f32, accumulate, target);
    } else {
      cpu::attention_bwd(problem, arrays.f32, accumulate, target);
    }
    return info(problem.family, target);
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
