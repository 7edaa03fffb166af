// How a row ends: the one place that knows what becomes of a row that sees no key, or whose every
// visible score is -inf. Read by C++ and by Metal shaders.
#pragma once

#include "shared/attn_math.h"

namespace forge {

FORGE_INLINE float attn_infinity() { return float_from_bits(0x7f800000); }
FORGE_INLINE float attn_nan() { return float_from_bits(0x7fc00000); }

// What is saved of a row. o is the sum of exp(s - m) v over l where it is live, else 0, whatever
// that sum holds. A row is live that sees a key whose score is not -inf, or NaN.
template <typename Real>
struct AttnRow {
  Real m;
  Real l;
  bool live;
};

// From the maximum and the sum over the keys that the row sees.
template <typename Real>
FORGE_INLINE AttnRow<Real> finished_row(bool sees_keys, Real m, Real l) {
  AttnRow<Real> row;
  row.live = sees_keys && l != Real(0);
  row.m = row.live ? m : -Real(attn_infinity());
  row.l = row.live ? l : Real(0);
  return row;
}

}  // namespace forge
