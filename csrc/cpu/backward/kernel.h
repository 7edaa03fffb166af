// What the schedule of the backward (schedule.cpp, once) and its kernels (kernel.cpp, once
// per CPU target) share.
//
// A block is a range of rows of one kv head (rows.h); it meets the keys tile by tile and then is
// done: dq is private to it, dk and dv are added to tile by tile.
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "cpu/rows.h"

namespace forge::cpu {

// Where dk or dv is summed up: float32, tile by tile. The output itself, if that is float32.
struct GradientSum {
  float* data;
  AttnStrides strides;
  bool add;  // to what the caller has put there
};

// o is float32, whatever the others are. dlse is null for zero.
struct BackwardArrays {
  Operand q;
  Operand k;
  Operand v;
  const float* o;
  Operand dout;
  const float* dlse;
  const float* row_max;
  const float* row_sum;
  Operand dq;
  Operand dk;
  Operand dv;
};

struct BackwardProblem {
  AttnParamsOf<float> params;
  BackwardArrays arrays;
  GradientSum dk;
  GradientSum dv;
  const AttnRange* ranges;
  bool accumulate;
};

// Sizes of the scratch of one block, in elements.
struct BackwardTiling {
  Int64 rows;  // rows of a block, a multiple of the target's lanes
  Int64 keys;  // keys of a tile
  Int64 hd;
  Int64 channels;     // hd rounded up to the target's lanes
  Int64 key_stride;   // of a packed key
  Int64 pair_stride;  // of a key's row of p and ds
};

struct BackwardBlock {
  BackwardTiling tiling;
  // Of the block's rows.
  Int64 row_begin;  // the first, among the Tq * rep of the kv head
  Int64 rows;       // as many as there are
  Int64 b;
  Int64 kv_head;
  float* q_lanes;  // [panel of rows][hd][rows of the panel]: rows in lanes
  float* dout_lanes;
  float* q_rows;  // [panel of channels][row][channels of the panel]: channels in lanes
  float* dout_rows;
  float* dq;       // [row][channels], not yet scaled
  float* row_max;  // [row]; rows that count for nothing hold zeros, here and in the arrays above
  float* inverse_sum;
  float* d_row;
  IndexRange live;   // rows that see keys; padding up to whole vectors is not live
  IndexRange* seen;  // [row], the keys that a live row sees
  IndexRange any;    // keys that some row sees
  IndexRange all;    // keys that every live row sees
  bool rows_finite;  // q and do of the live rows
  // Of the current tile of keys.
  Int64 tile_begin;
  Int64 tile_keys;   // as many as there are
  bool edge;         // some pairs are masked
  bool keys_finite;  // k
  float* k;          // [key][key_stride]
  float* v;
  float* p;  // [key][pair_stride]
  float* ds;
  float* slope;      // of the score map (scores.h), if it has one
  Int32* seen_from;  // [row], where edge: `seen`, counted from tile_begin
  Int32* seen_to;
};

struct BackwardKernels {
  int lanes;
  int tile_rows;  // of the largest register tile: what scratch must hold past the last row and key
  // Packs the rows, computes their d_row.
  void (*load_rows)(const BackwardProblem&, BackwardBlock&);
  // Packs a tile of keys; says whether it is an edge.
  void (*load_keys)(const BackwardProblem&, BackwardBlock&);
  // p and ds of the tile.
  void (*scores)(const BackwardProblem&, const BackwardBlock&);
  // dk and dv of the tile; follows: another block has added to it.
  void (*key_gradients)(const BackwardProblem&, const BackwardBlock&, bool follows);
  void (*row_gradients)(const BackwardBlock&);
  // The finished dq to its place: the partial sums [count][rows][channels] added up in this order.
  void (*store_dq)(const BackwardProblem&, const BackwardBlock&, const float* partial, Int64 count);
  // The finished sum of dk or dv, C-contiguous, of key t of sequence b to its place.
  void (*store_key)(const Operand& gradient, const float* sums, Int64 b, Int64 t, bool accumulate);
};

}  // namespace forge::cpu
