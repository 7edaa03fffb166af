// What one target's kernels for few query rows offer to the schedule.
#pragma once

#include "cpu/forward/kernel.h"

namespace forge::cpu {

// All rows of some kv heads of sequence b against some tiles of keys.
struct DecodeTask {
  SequenceMask mask;
  Int64 b;
  IndexRange heads;
  IndexRange tiles;
  Parts parts;    // of row 0 of kv head 0 and the first tile
  float* totals;  // likewise: where the parts are merged at once; null: that is left to merge_parts
  float* queries;  // room for group_rows of them, where q is of halves
};

// Merges `count` parts of some rows of one kv head, by ascending keys, with what was merged before.
struct MergeTask {
  SequenceMask mask;
  Int64 b;
  Int64 kv_head;
  IndexRange rows;
  Int64 count;
  Parts parts;    // of the first row
  float* totals;  // likewise
  bool first;     // nothing was merged before
  bool last;      // the rows are finished and stored
};

// Of a row in DecodeTask::queries: whole vectors of every target.
FORGE_INLINE Int64 query_floats(Int64 hd) { return round_up(hd, 16); }

struct DecodeKernels {
  Int64 most_rows;   // beyond so many rows a kv head, row blocks in lanes are faster
  Int64 group_rows;  // of all heads that a task works on together
  void (*run)(const ForwardCall&, const DecodeTask&);
  void (*merge_parts)(const ForwardCall&, const MergeTask&);
};

}  // namespace forge::cpu
