#include "dispatch/metal_backend.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/errors.h"
#include "shared/fused_tiling.h"

namespace forge {
namespace {

// Why no device's kernels take the problem; empty where they do.
std::string kernels_refuse(const Problem& problem) {
  if (problem.dtype == DType::kFloat64) {
    return "Metal has no float64; float64 needs backend='cpu'";
  }
  if (problem.family == Family::kMaterialized && is_half(problem.kv_dtype)) {
    return std::string("the materialized Metal kernels take float32, got ") +
           dtype_name(problem.kv_dtype);
  }
  if (problem.family == Family::kMaterialized) return "";
  if (const Int32 widest = std::max(problem.hd, problem.hv); widest > kMaxFusedHeadDim) {
    return "the fused Metal kernels take head dims 1 to " + std::to_string(kMaxFusedHeadDim) +
           ", got " + std::to_string(widest);
  }
  const Int64 longest = std::max(problem.H / problem.Hkv * problem.Tq, problem.Tk);
  if (longest > kMaxFusedLength) {
    return "the fused Metal kernels take up to " + std::to_string(kMaxFusedLength) +
           " keys, and as many queries times H / Hkv; got " + std::to_string(longest);
  }
  return "";
}

class MetalBackend final : public Backend {
 public:
  const char* name() const override { return "metal"; }

  Support available() const override {
    const std::string reason = metal::unavailable_reason();
    return {reason.empty(), reason};
  }

  Support supports(const Problem& problem) const override {
    std::string reason = kernels_refuse(problem);
    if (reason.empty() && problem.family == Family::kFused) {
      reason = metal::fused_unavailable_reason(problem);
    }
    return {reason.empty(), reason};
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

metal::StreamPlan plan_metal_stream(const Problem& problem, bool cut) {
  if (problem.family != Family::kFused) {
    throw NotServed("only kernel='fused' runs in a framework's command stream");
  }
  if (const std::string option = beyond_plain(problem); !option.empty()) {
    throw NotServed("a framework's command stream does not take " + option);
  }
  if (const std::string reason = kernels_refuse(problem); !reason.empty()) throw NotServed(reason);
  return metal::plan(problem, cut);
}

}  // namespace forge
