// The fused family on the CPU: attention in O(T) memory, on all cores.
#pragma once

#include "core/cpu_target.h"
#include "core/problem.h"

namespace forge::cpu {

// Writes o, row_max and row_sum. Throws std::bad_alloc before anything is written.
void attention_fwd(const Problem& problem, const ForwardArrays<float>& arrays, CpuTarget target);

// Computes d_row from o, dout and dlse, then dq, dk and dv; accumulate adds to what the three hold.
// Throws std::bad_alloc before anything is written.
void attention_bwd(const Problem& problem, const BackwardArrays<float>& arrays, bool accumulate,
                   CpuTarget target);

}  // namespace forge::cpu
