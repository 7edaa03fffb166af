// The materialized family on the CPU: kernels to check others against. All cores, fixed order.
#pragma once

#include "core/cpu_target.h"
#include "core/problem.h"

namespace forge::materialized {

// Computes what problem.pass says, in float32 or float64, and returns the target it ran on. A whole
// backward keeps d_row in memory of its own.
CpuTarget run(const Problem& problem, CpuTarget target);

}  // namespace forge::materialized
