#include "dispatch/cpu_backend.h"

#include <algorithm>

#include "core/cpu_target.h"
#include "core/thread_pool.h"
#include "cpu/attention.h"
#include "materialized/attention.h"

namespace forge {
namespace {

class CpuBackend final : public Backend {
 public:
  const char* name() const override { return "cpu"; }
  Support available() const override { return {true, ""}; }

  Support supports(const Problem& problem) const override {
    if (problem.family == Family::kMaterialized) {
      if (!is_half(problem.kv_dtype)) return {true, ""};
      return {false, std::string("the materialized kernels take float32 and float64, got ") +
                         dtype_name(problem.kv_dtype)};
    }
    if (problem.dtype == DType::kFloat64) {
      return {false,
              "float64 needs kernel='materialized'; the fused kernels take float32, float16 and "
              "bfloat16"};
    }
    const Int32 widest = std::max(problem.hd, problem.hv);
    if (widest > cpu::kMaxHeadDim) {
      return {false, "the fused kernels take head dims 1 to " + std::to_string(cpu::kMaxHeadDim) +
                         ", got " + std::to_string(widest)};
    }
    return {true, ""};
  }

  RunInfo run(const Problem& problem, const std::string& cpu_target) const override {
    CpuTarget target = choose_cpu_target(cpu_target);
    if (problem.family == Family::kMaterialized) {
      target = materialized::run(problem, target);
    } else if (problem.pass == Pass::kForward) {
      cpu::attention_fwd(problem, target);
    } else {
      cpu::attention_bwd(problem, target);
    }
    RunInfo info;
    info.backend = name();
    info.kernel = family_name(problem.family);
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
