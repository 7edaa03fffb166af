// The one description of an attention problem that every backend takes, and the arrays it works on.
#pragma once

#include <cstdint>
#include <vector>

#include "shared/attn_mask.h"
#include "shared/attn_params.h"

namespace forge {

enum class DType { kFloat32, kFloat64 };

// Two families: materialized keeps p for the backward and runs in a fixed order, fused recomputes p
// from the saved row statistics.
enum class Family { kMaterialized, kFused };

inline const char* family_name(Family family) {
  return family == Family::kFused ? "fused" : "materialized";
}

// The materialized backward kernels, one by one, in float32; the forward is one kernel already.
enum class BackwardKernel { kD, kDq, kDkv };

// The bytes [begin, end).
struct MemoryBlock {
  const char* begin;
  const char* end;
};

struct Problem {
  DType dtype = DType::kFloat32;
  Family family = Family::kFused;
  AttnParamsOf<double> params{};  // scale and softcap as given; kernels take them in their own type
  std::vector<AttnRange> ranges;  // B of them
};

// The same parameters with scale and softcap rounded to the kernel's type.
template <typename Real>
AttnParamsOf<Real> params_as(const Problem& problem) {
  const AttnParamsOf<double>& from = problem.params;
  AttnParamsOf<Real> to;
  to.B = from.B;
  to.Tq = from.Tq;
  to.Tk = from.Tk;
  to.window_left = from.window_left;
  to.window_right = from.window_right;
  to.q = from.q;
  to.k = from.k;
  to.v = from.v;
  to.o = from.o;
  to.dout = from.dout;
  to.dq = from.dq;
  to.dk = from.dk;
  to.dv = from.dv;
  to.H = from.H;
  to.Hkv = from.Hkv;
  to.hd = from.hd;
  to.causal = from.causal;
  to.scale = static_cast<Real>(from.scale);
  to.softcap = static_cast<Real>(from.softcap);
  return to;
}

// What the forward saves of each row for the backward: m and l, apart. [B, H, Tq], contiguous.
template <typename Real>
struct RowStats {
  Real* row_max;
  Real* row_sum;
};

// Base pointers; strides stand in the problem. p is [B, H, Tq, Tk], contiguous, and only of the
// materialized family (null otherwise).
template <typename Real>
struct ForwardArrays {
  const Real* q;
  const Real* k;
  const Real* v;
  Real* o;
  Real* p;
  RowStats<Real> stats;
};

// d_row is [B, H, Tq], contiguous; dlse likewise, or null for zero.
template <typename Real>
struct BackwardArrays {
  const Real* q;
  const Real* k;
  const Real* v;
  const Real* o;
  const Real* dout;
  const Real* dlse;
  const Real* p;               // materialized
  RowStats<const Real> stats;  // fused
  Real* d_row;
  Real* dq;
  Real* dk;
  Real* dv;
};

// Position of row (b, h, i) in [B, H, Tq].
template <typename Real>
FORGE_INLINE std::int64_t row_index(const AttnParamsOf<Real>& params, std::int64_t b,
                                    std::int64_t h, std::int64_t i) {
  return (b * params.H + h) * params.Tq + i;
}

}  // namespace forge
