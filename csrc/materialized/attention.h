// The materialized family on the CPU: kernels to check others against. All cores, fixed order.
#pragma once

#include "core/cpu_target.h"
#include "core/problem.h"

namespace forge::materialized {

// Each returns the target it ran on.
template <typename Real>
CpuTarget attention_fwd(const Problem& problem, const ForwardArrays<Real>& arrays,
                        CpuTarget target);
// Writes dq, dk and dv, or adds to what they hold; d_row goes to memory of the call's own.
template <typename Real>
CpuTarget attention_bwd(const Problem& problem, const BackwardArrays<Real>& arrays, bool accumulate,
                        CpuTarget target);

// The kernels of the backward one by one; they add to what dq, dk and dv hold.
template <typename Real>
CpuTarget attention_bwd_d(const Problem& problem, const BackwardArrays<Real>& arrays,
                          CpuTarget target);
template <typename Real>
CpuTarget attention_bwd_dq(const Problem& problem, const BackwardArrays<Real>& arrays,
                           CpuTarget target);
template <typename Real>
CpuTarget attention_bwd_dkv(const Problem& problem, const BackwardArrays<Real>& arrays,
                            CpuTarget target);

}  // namespace forge::materialized
