// The materialized family on the CPU: kernels to check others against. All cores, fixed order.
#pragma once

#include "core/cpu_target.h"
#include "core/problem.h"

namespace forge::materialized {

// Each returns the target it ran on. The backward kernels add to what dq, dk and dv hold.
template <typename Real>
CpuTarget attention_fwd(const Problem& problem, const ForwardArrays<Real>& arrays,
                        CpuTarget target);
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
