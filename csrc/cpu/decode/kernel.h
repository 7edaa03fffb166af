// What one target's kernels for few query rows offer to the schedule.
#pragma once

#include "cpu/forward/kernel.h"

namespace forge::cpu {

// Unfinished rows of a split over keys: each has m, l and, kPartialHead floats on, the sum of p v.
constexpr Int64 kPartialHead = 16;
FORGE_INLINE Int64 partial_row_floats(Int64 hd) { return kPartialHead + (hd + 15) / 16 * 16; }

// All rows of some kv heads of sequence b against some keys.
struct DecodeTask {
  AttnBand band;
  Int64 b;
  IndexRange heads;
  IndexRange keys;
  float* partial;  // of row 0 of kv head 0
};

// Some rows of one kv head, each from `splits` partial rows that lie split_floats apart, added up
// in that order.
struct CombineTask {
  AttnBand band;
  Int64 b;
  Int64 kv_head;
  IndexRange rows;
  Int64 splits;
  Int64 split_floats;
  const float* partial;  // of the first row
};

struct DecodeKernels {
  Int64 most_rows;  // beyond so many rows a kv head, row blocks in lanes are faster
  void (*run)(const ForwardCall&, const DecodeTask&);
  void (*combine)(const ForwardCall&, const CombineTask&);
};

}  // namespace forge::cpu
