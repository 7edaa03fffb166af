// Which keys a query sees: the one place that knows causal masks, windows and alignment (Tq != Tk).
// Read by C++ and by Metal shaders.
#pragma once

#include "shared/index_range.h"

namespace forge {

// The mask of one sequence as a diagonal band: query i sees key j if and only if
//   max(i + begin_shift, key_begin) <= j < min(i + end_shift, key_end).
struct AttnBand {
  Int64 begin_shift;
  Int64 end_shift;
  Int64 key_begin;
  Int64 key_end;
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
  band.begin_shift =
      params.window_left < 0 ? int64_min() : saturating_sub(range.query_offset, params.window_left);
  Int64 last = params.window_right < 0 ? int64_max()
                                       : saturating_add(range.query_offset, params.window_right);
  if (params.causal && last > range.query_offset) last = range.query_offset;
  band.end_shift = saturating_add(last, 1);
  band.key_begin = larger(range.key_start, Int64(0));
  band.key_end = smaller(range.key_end, params.Tk);
  if (band.key_begin >= band.key_end) {
    band.key_begin = 0;
    band.key_end = 0;
  }
  return band;
}

// The keys that query i sees, within [key_begin, key_end]. Both ends move with i and never
// backwards, for dead rows too, and the end is never before the begin: callers may add and subtract
// them.
FORGE_INLINE IndexRange visible_keys(AttnBand band, Int64 i) {
  Int64 begin = saturating_add(i, band.begin_shift);
  Int64 end = saturating_add(i, band.end_shift);
  return index_range(smaller(larger(begin, band.key_begin), band.key_end),
                     larger(smaller(end, band.key_end), band.key_begin));
}

// The queries among [0, Tq) that see key j: the inverse of visible_keys.
FORGE_INLINE IndexRange visible_queries(AttnBand band, Int64 j, Int64 Tq) {
  if (j < band.key_begin || j >= band.key_end) return nothing();
  Int64 begin = saturating_add(saturating_sub(j, band.end_shift), 1);
  Int64 end = saturating_add(saturating_sub(j, band.begin_shift), 1);
  return index_range(larger(begin, Int64(0)), smaller(end, Tq));
}

}  // namespace forge
