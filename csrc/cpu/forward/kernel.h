// What one target's forward kernels offer to the schedule, which belongs to no target.
#pragma once

#include <cstddef>

#include "core/sequence_mask.h"
#include "cpu/rows.h"

namespace forge::cpu {

// All arrays of a problem and its options, as the kernels want them.
struct ForwardCall {
  AttnParams params;
  Operand q;
  Operand k;
  Operand v;
  Operand o;
  Operand rounded;  // o once more, in q's type; without data: not wanted
  PairArrays pairs;
  Operand sinks;   // without data: none
  float* row_max;  // null where the statistics are not asked for; then row_sum is too
  float* row_sum;
};

// Parts of rows: each has m, l and, kPartHead floats on, the sum of p v (key_tiles.h). Those of one
// row lie `stride` floats apart, tile by tile.
struct Parts {
  float* first;
  Int64 stride;
};
constexpr Int64 kPartHead = 16;
FORGE_INLINE Int64 part_floats(Int64 hv) { return kPartHead + round_up(hv, 16); }

// Some rows of one kv head (rows.h). Without parts: against all keys that they see; the rows are
// finished and stored. Else against some tiles of keys, for whose parts there is room.
struct ForwardTask {
  SequenceMask mask;
  Int64 b;
  Int64 kv_head;
  IndexRange rows;
  IndexRange tiles;
  Parts parts;  // of the first row and tile; part_floats from row to row
};

struct ForwardKernels {
  int row_block;  // rows that run side by side; tasks want a multiple
  Int64 (*tile_keys)(Int64 widest_head);
  std::size_t (*scratch_bytes)(const ForwardCall&, Int64 rows);
  void (*run)(const ForwardCall&, const ForwardTask&, char* scratch);
};

}  // namespace forge::cpu
