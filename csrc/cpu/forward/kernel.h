// What one target's forward kernels offer to the schedule, which belongs to no target.
#pragma once

#include <cstddef>

#include "shared/attn_mask.h"

namespace forge::cpu {

// All arrays of a problem and its options, as the kernels want them.
struct ForwardCall {
  AttnParams params;
  Int64 rep;  // query heads a kv head
  const float* q;
  const float* k;
  const float* v;
  float* o;
  float* row_max;
  float* row_sum;
};

// The rows [row_begin, row_end) of one kv head against the keys [key_begin, key_end). Row r is
// query r / rep of the group's head r % rep: all heads of the group share what is read of k and v,
// and rows next to each other see nearly the same keys.
struct ForwardTask {
  AttnBand band;
  Int64 b;
  Int64 kv_head;
  Int64 row_begin;
  Int64 row_end;
  Int64 key_begin;
  Int64 key_end;
  float*
      partial;  // null: rows are finished and stored; else they go here unfinished, as decode's do
};

struct ForwardKernels {
  int row_block;  // rows that run side by side; tasks want a multiple
  std::size_t (*scratch_bytes)(Int64 hd, Int64 rows);
  void (*run)(const ForwardCall&, const ForwardTask&, char* scratch);
};

}  // namespace forge::cpu
