#include "dispatch/metal_backend.h"

#include <algorithm>
#include <string>
#include <utility>

#include "metal/attention.h"
#include "shared/fused_tiling.h"

namespace forge {
namespace {

class MetalBackend final : public Backend {
 public:
  const char* name() const override { return "metal"; }

  Support available() const override {
    const std::string reason = metal::unavailable_reason();
    return {reason.empty(), reason};
  }

  Support supports(const Problem& problem) const override {
    if (problem.dtype == DType::kFloat64) {
      return {false, "Metal has no float64; float64 needs backend='cpu'"};
    }
    if (problem.family == Family::kMaterialized && is_half(problem.kv_dtype)) {
      return {false, std::string("the materialized Metal kernels take float32, got ") +
                         dtype_name(problem.kv_dtype)};
    }
    if (const std::string option = beyond_plain(problem); !option.empty()) {
      return {false, "the Metal kernels do not take " + option};
    }
    if (problem.family == Family::kFused && problem.hd > kMaxFusedHeadDim) {
      return {false, "the fused Metal kernels take head dims 1 to " +
                         std::to_string(kMaxFusedHeadDim) + ", got " + std::to_string(problem.hd)};
    }
    const Int64 rows = problem.H / problem.Hkv * problem.Tq;
    const Int64 longest = std::max(rows, problem.Tk);
    if (problem.family == Family::kFused && longest > kMaxFusedLength) {
      return {false, "the fused Metal kernels take up to " + std::to_string(kMaxFusedLength) +
                         " keys, and as many queries times H / Hkv; got " +
                         std::to_string(longest)};
    }
    if (problem.family == Family::kFused) {
      const std::string reason = metal::fused_unavailable_reason(problem);
      return {reason.empty(), reason};
    }
    return {true, ""};
  }

  RunInfo run(const Problem& problem, const std::string&) const override {
    metal::Ran ran = metal::run(problem);
    RunInfo info;
    info.backend = name();
    info.kernel = family_name(problem.family);
    info.device = std::move(ran.device);
    info.library = std::move(ran.library);
    info.arrays = std::move(ran.arrays);
    return info;
  }
};

}  // namespace

const Backend& metal_backend() {
  static const MetalBackend backend;
  return backend;
}

}  // namespace forge
