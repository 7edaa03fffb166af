// Which keys a query sees: the one place that knows causal masks, windows and alignment (Tq != Tk).
// Read by C++ and by Metal shaders.
#pragma once

#include "shared/attn_params.h"

namespace forge {

// Inclusive on both ends; empty when lo > hi.
struct IndexRange {
  Int64 lo;
  Int64 hi;
};

// The mask of one sequence as a diagonal band: query i sees key j if and only if
//   max(i + lo_shift, key_lo) <= j <= min(i + hi_shift, key_hi).
struct AttnBand {
  Int64 lo_shift;
  Int64 hi_shift;
  Int64 key_lo;
  Int64 key_hi;
};

FORGE_INLINE Int64 int64_max() { return 0x7fffffffffffffff; }
FORGE_INLINE Int64 int64_min() { return -int64_max() - 1; }

// a + b and a - b, held at the ends of int64 instead of overflowing.
FORGE_INLINE Int64 saturating_add(Int64 a, Int64 b) {
  if (b > 0 && a > int64_max() - b) return int64_max();
  if (b < 0 && a < int64_min() - b) return int64_min();
  return a + b;
}
FORGE_INLINE Int64 saturating_sub(Int64 a, Int64 b) {
  if (b < 0 && a > int64_max() + b) return int64_max();
  if (b > 0 && a < int64_min() + b) return int64_min();
  return a - b;
}

// Saturation never changes which keys are visible: a saturated end lies beyond every real key on
// the side where the exact one does.
template <typename Params>
FORGE_INLINE AttnBand attn_band(Params params, AttnRange range) {
  AttnBand band;
  band.lo_shift =
      params.window_left < 0 ? int64_min() : saturating_sub(range.query_offset, params.window_left);
  band.hi_shift = params.window_right < 0 ? int64_max()
                                          : saturating_add(range.query_offset, params.window_right);
  if (params.causal && band.hi_shift > range.query_offset) band.hi_shift = range.query_offset;
  band.key_lo = range.key_start > 0 ? range.key_start : 0;
  band.key_hi = range.key_end < params.Tk ? range.key_end - 1 : params.Tk - 1;
  if (band.key_lo > band.key_hi) {
    band.key_lo = 0;
    band.key_hi = -1;
  }
  return band;
}

// The keys that query i sees. Both ends move with i and never backwards, for dead rows too, and
// stay within [key_lo, key_hi + 1] and [key_lo - 1, key_hi]: callers may add and subtract them.
FORGE_INLINE IndexRange visible_keys(AttnBand band, Int64 i) {
  Int64 lo = saturating_add(i, band.lo_shift);
  Int64 hi = saturating_add(i, band.hi_shift);
  IndexRange keys;
  keys.lo = lo > band.key_lo ? lo : band.key_lo;
  keys.hi = hi < band.key_hi ? hi : band.key_hi;
  if (keys.lo > band.key_hi + 1) keys.lo = band.key_hi + 1;
  if (keys.hi < band.key_lo - 1) keys.hi = band.key_lo - 1;
  return keys;
}

// The queries among [0, Tq) that see key j: the inverse of visible_keys.
FORGE_INLINE IndexRange visible_queries(AttnBand band, Int64 j, Int64 Tq) {
  IndexRange queries;
  if (j < band.key_lo || j > band.key_hi) {
    queries.lo = 0;
    queries.hi = -1;
    return queries;
  }
  Int64 lo = saturating_sub(j, band.hi_shift);
  Int64 hi = saturating_sub(j, band.lo_shift);
  queries.lo = lo > 0 ? lo : 0;
  queries.hi = hi < Tq - 1 ? hi : Tq - 1;
  return queries;
}

}  // namespace forge
