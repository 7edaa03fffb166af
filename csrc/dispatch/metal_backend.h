#pragma once

#include "dispatch/backend.h"
#include "metal/attention.h"

namespace forge {

// The Apple GPU, or the reason why it is not there.
const Backend& metal_backend();

// The problem as dispatches for a framework's own command stream, see metal::plan. Throws
// NotServed, with the reason, for what the fused kernels do not take and where this build has no
// shaders.
metal::StreamPlan plan_metal_stream(const Problem& problem, bool cut);

}  // namespace forge
