// Half-open ranges of rows, keys or tiles, and the arithmetic of cutting them up. Every range
// inside is one of these. Read by C++ and by Metal shaders.
#pragma once

#include "shared/attn_params.h"

namespace forge {

FORGE_INLINE Int64 smaller(Int64 a, Int64 b) { return a < b ? a : b; }
FORGE_INLINE Int64 larger(Int64 a, Int64 b) { return a > b ? a : b; }
FORGE_INLINE Int64 ceil_div(Int64 a, Int64 b) { return (a + b - 1) / b; }
FORGE_INLINE Int64 round_up(Int64 a, Int64 step) { return ceil_div(a, step) * step; }

// [begin, end); empty where begin >= end.
struct IndexRange {
  Int64 begin;
  Int64 end;
};

FORGE_INLINE IndexRange index_range(Int64 begin, Int64 end) {
  IndexRange range;
  range.begin = begin;
  range.end = end;
  return range;
}

FORGE_INLINE IndexRange nothing() { return index_range(0, 0); }
FORGE_INLINE bool is_empty(IndexRange range) { return range.begin >= range.end; }
FORGE_INLINE bool contains(IndexRange range, Int64 x) { return range.begin <= x && x < range.end; }

FORGE_INLINE IndexRange overlap(IndexRange a, IndexRange b) {
  return index_range(larger(a.begin, b.begin), smaller(a.end, b.end));
}

// The shortest range that holds both; an empty one adds nothing.
FORGE_INLINE IndexRange hull(IndexRange a, IndexRange b) {
  if (is_empty(a)) return b;
  if (is_empty(b)) return a;
  return index_range(smaller(a.begin, b.begin), larger(a.end, b.end));
}

}  // namespace forge
