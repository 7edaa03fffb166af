// Tiles of floats, and the one place that knows simdgroup_matrix. A block is 8 x 8 floats over the
// 32 lanes of a simdgroup: two neighbours of one row to a lane, four lanes to a row. Everything
// else (masks, exponentials, reading and writing) is plain arithmetic on a lane's two floats, so
// another GPU's matrix unit needs another lane_place, multiply_add, row_sum and row_max, and no
// other kernel.
#pragma once

#include <metal_stdlib>

#include "shared/attn_math.h"
#include "shared/fused_tiling.h"

using namespace metal;  // uint, ushort and float2 may be found there only

namespace forge {

// A lane's share of a block: (row, column) and (row, column + 1).
typedef float2 Block;

// N blocks: of a row of blocks, each lane has floats of one row; of a column, of two columns.
template <int N>
struct Blocks {
  Block at[N];
};

// Where a lane stands in every block, and in its threadgroup.
struct Lane {
  Int32 row;
  Int32 column;
  Int32 lane;
  Int32 simdgroup;
};

static inline Lane lane_place(uint lane, uint simdgroup) {
  Lane at;
  at.row = Int32(((lane / 4) & 4) + ((lane / 2) % 4));
  at.column = Int32(2 * (((lane / 4) & 2) + lane % 2));
  at.lane = Int32(lane);
  at.simdgroup = Int32(simdgroup);
  return at;
}

// The lane that holds (row, column), the inverse of lane_place.
static inline ushort lane_holding(Int32 row, Int32 column) {
  return ushort((row & 4) * 4 + (row & 3) * 2 + (column & 4) * 2 + (column & 2) / 2);
}

// sum + a b
static inline Block multiply_add(Block a, Block b, Block sum) {
  metal::simdgroup_float8x8 left;
  metal::simdgroup_float8x8 right;
  metal::simdgroup_float8x8 total;
  left.thread_elements()[0] = a.x;
  left.thread_elements()[1] = a.y;
  right.thread_elements()[0] = b.x;
  right.thread_elements()[1] = b.y;
  total.thread_elements()[0] = sum.x;
  total.thread_elements()[1] = sum.y;
  metal::simdgroup_multiply_accumulate(total, left, right, total);
  return Block(total.thread_elements()[0], total.thread_elements()[1]);
}

// Reductions over a row: the four lanes that hold it get the same result.
static inline float row_sum(Block x) {
  float sum = x.x + x.y;
  sum += metal::simd_shuffle_xor(sum, 1);
  sum += metal::simd_shuffle_xor(sum, 8);
  return sum;
}

// NaN is passed over.
static inline float larger(float a, float b) { return a > b ? a : b; }

static inline float row_max(float x) {
  x = larger(metal::simd_shuffle_xor(x, 1), x);
  return larger(metal::simd_shuffle_xor(x, 8), x);
}

// One block of a tile in threadgroup memory, whose rows are `stride` floats apart.
static inline Block load_block(threadgroup const float* tile, Int32 stride, Lane at) {
  threadgroup const float* from = tile + at.row * stride + at.column;
  return Block(from[0], from[1]);
}

static inline Block load_transposed(threadgroup const float* tile, Int32 stride, Lane at) {
  threadgroup const float* from = tile + at.column * stride + at.row;
  return Block(from[0], from[stride]);
}

// Element c and c + 1 of a row in device memory, zeros from hd on. Rows are aligned to 4 bytes, no
// more: two loads.
static inline Block load_pair(device const float* row, Int32 c, Int32 hd) {
  return Block(c < hd ? row[c] : 0.0f, c + 1 < hd ? row[c + 1] : 0.0f);
}

static inline void store_pair(device float* row, Int32 c, Int32 hd, Block values) {
  if (c < hd) row[c] = values.x;
  if (c + 1 < hd) row[c + 1] = values.y;
}

}  // namespace forge
