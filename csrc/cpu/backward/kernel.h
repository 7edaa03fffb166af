// What the schedule of the backward (schedule.cpp, once) and its kernels (kernel.cpp, once
// per CPU target) share.
//
// A block is a range of rows of one kv head (rows.h); it meets the keys tile by tile and then is
// done: dq is private to it, dk and dv are added to tile by tile.
#pragma once

#include <array>
#include <cstdint>

#include "core/problem.h"
#include "cpu/rows.h"

namespace forge::cpu {

// Where dk or dv is summed up: float32, tile by tile. The output itself, if that is float32.
struct GradientSum {
  float* data;
  AttnStrides strides;
  Int64 channels;  // hd or hv
  bool add;        // to what the caller has put there
};

// Where dbias is summed: its axes that are not summed over decide how.
enum class BiasAxes {
  kNone,     // there is no dbias
  kColumns,  // it lacks Tq: sums of each head's keys, which the blocks add to in turn
  kRows,     // it has Tq and lacks Tk: sums of each head's rows, private to a block
  kPairs,    // it has both: the array itself, or float32 in its place
};

struct BiasSum {
  BiasAxes axes;
  float* data;
  std::array<Int64, 3> strides;  // of b, head, query; 0 along what is summed over here
};

// Rows of a block at most; more where dbias has both and adds up more heads than that.
constexpr Int64 kMostRows = 192;

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
  PairArrays pairs;  // not given, perhaps, nor are those that follow
  Operand dbias;
  Operand sinks;
  Operand dsinks;
};

struct BackwardProblem {
  AttnParamsOf<float> params;
  BackwardArrays arrays;
  GradientSum dk;
  GradientSum dv;
  BiasSum bias;
  const AttnRange* ranges;
  bool accumulate;
};

// Sizes of the scratch of one block, in elements.
struct BackwardTiling {
  Int64 rows;  // room for the rows of a block, a multiple of the target's lanes
  Int64 keys;  // keys of a tile
  Int64 hd;
  Int64 hv;
  Int64 channels;        // hd rounded up to the target's lanes
  Int64 value_channels;  // likewise hv
  Int64 key_stride;      // of a packed key
  Int64 value_stride;    // of a packed value
  Int64 pair_stride;     // of a key's row of p and ds
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
  IndexRange* seen;  // [row], the keys that a live row sees; none for dead rows and for padding
  IndexRange all;    // keys that every live row sees; none where no row is live
  bool all_live;     // padding up to whole vectors is not live
  bool rows_finite;  // q and do of the live rows
  PairRow* pairs;    // [row], where there are pair arrays
  float* row_sums;   // [row], of dbias, if it is summed so
  // Of the current tile of keys.
  Int64 tile_begin;
  Int64 tile_keys;   // as many as there are
  bool edge;         // some pairs are masked
  bool keys_finite;  // k
  bool values_finite;
  float* k;  // [key][key_stride]
  float* v;  // [key][value_stride]
  float* p;  // [key][pair_stride]
  float* ds;
  float* slope;       // of the score map (scores.h), if it has one
  float* bias_room;   // [key][pair_stride], where there are pair arrays
  const float* bias;  // in it, or null: nothing to add, and nothing is hidden
  float* bias_ds;     // ds before the slope, for dbias; ds itself without one; null: not wanted
  Int32* seen_from;   // [row], where edge: `seen`, counted from tile_begin
  Int32* seen_to;
  Int32* rows_from;  // [key], where edge: the rows between the first and the last that see it
  Int32* rows_to;
};

// Elements that lie `stride` apart, of any type.
struct StridedElements {
  void* data;
  DType dtype;
  Int64 stride;
};

FORGE_INLINE bool is_live(const BackwardBlock& block, Int64 row) {
  return !is_empty(block.seen[row]);
}

struct BackwardKernels {
  int lanes;
  int tile_rows;  // of the largest register tile: what scratch must hold past the last row and key
  // Packs the rows, computes their d_row.
  void (*load_rows)(const BackwardProblem&, BackwardBlock&);
  // Which rows see which keys of the tile; false: none sees any, and the tile is as good as done.
  bool (*find_tile)(const BackwardProblem&, BackwardBlock&);
  // Packs a tile of keys.
  void (*load_keys)(const BackwardProblem&, BackwardBlock&);
  // p and ds of the tile.
  void (*scores)(const BackwardProblem&, const BackwardBlock&);
  // dk and dv of the tile; follows: another block has added to it.
  void (*key_gradients)(const BackwardProblem&, const BackwardBlock&, bool follows);
  // Adds the tile's part of dbias to its sum.
  void (*bias_gradients)(const BackwardProblem&, const BackwardBlock&);
  void (*row_gradients)(const BackwardBlock&);
  // The finished dq to its place: the partial sums [count][rows][channels] added up in this order.
  void (*store_dq)(const BackwardProblem&, const BackwardBlock&, const float* partial, Int64 count);
  // The finished sum of dk or dv, C-contiguous, of key t of sequence b to its place.
  void (*store_key)(const Operand& gradient, const float* sums, Int64 b, Int64 t, bool accumulate);
  // What each query of head h adds to dsinks: terms [Tq].
  void (*sink_terms)(const BackwardProblem&, Int64 b, Int64 h, float* terms);
  void (*store_elements)(const StridedElements& to, const float* from, Int64 count,
                         bool accumulate);
};

}  // namespace forge::cpu
