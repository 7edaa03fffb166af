// What one target's forward kernels offer to the schedule, which belongs to no target.
#pragma once

#include <cstddef>

#include "cpu/rows.h"

namespace forge::cpu {

// All arrays of a problem and its options, as the kernels want them.
struct ForwardCall {
  AttnParams params;
  const float* q;
  const float* k;
  const float* v;
  float* o;
  float* row_max;  // null where the statistics are not asked for; then row_sum is too
  float* row_sum;
};

// Some rows of one kv head (rows.h) against some keys.
struct ForwardTask {
  AttnBand band;
  Int64 b;
  Int64 kv_head;
  IndexRange rows;
  IndexRange keys;
  // Null: rows are finished and stored; else they go here unfinished, as decode's do.
  float* partial;
};

struct ForwardKernels {
  int row_block;  // rows that run side by side; tasks want a multiple
  std::size_t (*scratch_bytes)(Int64 hd, Int64 rows);
  void (*run)(const ForwardCall&, const ForwardTask&, char* scratch);
};

}  // namespace forge::cpu
