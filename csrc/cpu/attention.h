// The fused family on the CPU: attention in O(T) memory, on all cores.
#pragma once

#include "core/cpu_target.h"
#include "core/problem.h"

namespace forge::cpu {

constexpr Int32 kMaxHeadDim = 512;

// Writes o and, where they are given, row_max and row_sum. Throws std::bad_alloc before anything is
// written.
void attention_fwd(const Problem& problem, CpuTarget target);

// Writes dq, dk and dv, or adds to what they hold; d = dout . o - dlse is worked out on the way.
// Throws std::bad_alloc before anything is written.
void attention_bwd(const Problem& problem, CpuTarget target);

}  // namespace forge::cpu
