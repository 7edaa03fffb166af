// What one target's kernels for few query rows offer to the schedule.
#pragma once

#include "cpu/forward/kernel.h"

namespace forge::cpu {

// Unfinished rows of a split over keys: each has m, l and, kPartialHead floats on, the sum of p v.
constexpr Int64 kPartialHead = 16;
FORGE_INLINE Int64 partial_row_floats(Int64 hd) { return kPartialHead + (hd + 15) / 16 * 16; }

// All rows of the kv heads [head_begin, head_end) of sequence b against keys [key_begin, key_end).
struct DecodeTask {
  AttnBand band;
  Int64 b;
  Int64 head_begin;
  Int64 head_end;
  Int64 key_begin;
  Int64 key_end;
  float* partial;  // of row 0 of kv head 0
};

// Row r (query r / rep, head r % rep of the group) of one kv head, from `splits` partial rows that
// lie split_floats apart, added up in that order.
struct CombineTask {
  AttnBand band;
  Int64 b;
  Int64 kv_head;
  Int64 row_begin;
  Int64 row_end;
  Int64 splits;
  Int64 split_floats;
  const float* partial;  // of row_begin
};

struct DecodeKernels {
  Int64 most_rows;  // beyond so many rows a kv head, row blocks in lanes are faster
  Int64 most_head_size;
  void (*run)(const ForwardCall&, const DecodeTask&);
  void (*combine)(const ForwardCall&, const CombineTask&);
};

}  // namespace forge::cpu
