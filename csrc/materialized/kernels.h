// The materialized kernels over a range of rows, compiled once per instruction set. Every
// target computes the same bits: one rounding per operation, in a fixed order, fma where the order
// says fma.
#pragma once

#include <cstdint>

#include "core/problem.h"

namespace forge::materialized {

// Rows are numbered b-major: (b, h, i) for query rows, (b, hkv, j) for key/value rows.
template <typename Real>
struct Kernels {
  using Params = AttnParamsOf<Real>;
  using Fn = void (*)(const Params&, const AttnRange*, const Operands&, std::int64_t begin,
                      std::int64_t end);
  Fn fwd;
  Fn bwd_d;
  Fn bwd_dq;
  Fn bwd_dkv;
  Fn bwd_dbias;   // over the rows of dbias, [B|1, H|1, Tq|1]
  Fn bwd_dsinks;  // over those of dsinks
};

namespace baseline {
extern const Kernels<float> kKernelsF32;
extern const Kernels<double> kKernelsF64;
}  // namespace baseline

#if defined(__x86_64__)
// The same text with hardware fma; baseline x86-64 calls the C library's.
namespace avx2 {
extern const Kernels<float> kKernelsF32;
extern const Kernels<double> kKernelsF64;
}  // namespace avx2
#endif

}  // namespace forge::materialized
