// Tiles, and the one place that knows simdgroup_matrix. A block is 8 x 8 floats over the 32 lanes
// of a simdgroup: two neighbours of one row to a lane, four lanes to a row. Everything else (masks,
// exponentials, reading and writing) is plain arithmetic on a lane's two floats, so another GPU's
// matrix unit needs another lane_place, multiply_add, row_sum and row_max, and no other kernel.
//
// Channels are dealt to blocks so that a lane's are neighbours in memory. Blocks come in groups of
// four (at the end of a run two or one): channel j of block i of a group of G is number G * j + i
// of the group's 8 * G. A lane with the channels (column, column + 1) of each block has 2 * G
// neighbours, one with channel `row` has G. Sums over channels do not care, as long as both factors
// are dealt alike.
#pragma once

#include <metal_stdlib>

#include "shared/attn_math.h"
#include "shared/fused_tiling.h"

using namespace metal;  // uint, ushort, float2 and float4 may be found there only

namespace forge {

// A lane's share of a block: (row, column) and (row, column + 1).
typedef float2 Block;

template <int N>
struct Blocks {
  Block at[N];
};

// Where a lane stands in every block.
struct Lane {
  Int32 row;
  Int32 column;
};

METAL_FUNC Lane lane_place(uint lane) {
  Lane at;
  at.row = Int32(((lane / 4) & 4) + ((lane / 2) % 4));
  at.column = Int32(2 * (((lane / 4) & 2) + lane % 2));
  return at;
}

// The lane that holds (row, column), the inverse of lane_place.
METAL_FUNC ushort lane_holding(Int32 row, Int32 column) {
  return ushort((row & 4) * 4 + (row & 3) * 2 + (column & 4) * 2 + (column & 2) / 2);
}

// sum + a b
METAL_FUNC Block multiply_add(Block a, Block b, Block sum) {
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
METAL_FUNC float row_sum(Block x) {
  float sum = x.x + x.y;
  sum += metal::simd_shuffle_xor(sum, 1);
  sum += metal::simd_shuffle_xor(sum, 8);
  return sum;
}

// NaN in `a` is passed over.
METAL_FUNC float larger(float a, float b) { return a > b ? a : b; }

METAL_FUNC float row_max(float x) {
  x = larger(metal::simd_shuffle_xor(x, 1), x);
  return larger(metal::simd_shuffle_xor(x, 8), x);
}

template <int N>
METAL_FUNC void set_zero(thread Blocks<N>& blocks) {
#pragma clang loop unroll(full)
  for (Int32 n = 0; n < N; ++n) blocks.at[n] = Block(0.0f, 0.0f);
}

// By selection, for a `b` that no compiler knows: registers have no index.
template <int N>
METAL_FUNC Block block_of(thread const Blocks<N>& blocks, Int32 b) {
  Block block = blocks.at[0];
#pragma clang loop unroll(full)
  for (Int32 n = 1; n < N; ++n) {
    if (b == n) block = blocks.at[n];
  }
  return block;
}

// Blocks in the group that begins with block `first` of a run of N.
template <int N>
METAL_FUNC constexpr Int32 group_size(Int32 first) {
  static_assert(N % 4 != 3, "groups of four, then one of two or of one");
  return N - first < 4 ? N - first : 4;
}

// Four neighbours, or two, of a tile in threadgroup memory.
METAL_FUNC float4 four_at(threadgroup const float* at) {
  return *reinterpret_cast<threadgroup const float4*>(at);
}
METAL_FUNC float2 two_at(threadgroup const float* at) {
  return *reinterpret_cast<threadgroup const float2*>(at);
}
METAL_FUNC void put_four(threadgroup float* at, float4 x) {
  *reinterpret_cast<threadgroup float4*>(at) = x;
}

// A group of a run's blocks with channels across, from a tile whose rows are aligned to four: the
// lane has one row, the channels column and column + 1 of each block.
template <int N, typename T>
METAL_FUNC void load_across(threadgroup const T* row, Int32 first, Int32 column,
                            thread Blocks<4>& to) {
  Int32 size = group_size<N>(first);
  Int32 c = first * kBlockSize + size * column;
  if (size == 1) {
    to.at[0] = two_at(row + c);
    return;
  }
  float4 x = four_at(row + c);
  if (size == 2) {
    to.at[0] = Block(x.x, x.z);
    to.at[1] = Block(x.y, x.w);
    return;
  }
  float4 y = four_at(row + c + 4);
  to.at[0] = Block(x.x, y.x);
  to.at[1] = Block(x.y, y.y);
  to.at[2] = Block(x.z, y.z);
  to.at[3] = Block(x.w, y.w);
}

// A group with channels down: the lane has channel `row` of each block, of two neighbouring rows of
// the tile.
template <int N, typename T>
METAL_FUNC void load_down(threadgroup const T* left, threadgroup const T* right, Int32 first,
                          Int32 row, thread Blocks<4>& to) {
  Int32 size = group_size<N>(first);
  Int32 c = first * kBlockSize + size * row;
  if (size == 1) {
    to.at[0] = Block(left[c], right[c]);
    return;
  }
  if (size == 2) {
    float2 x = two_at(left + c);
    float2 y = two_at(right + c);
    to.at[0] = Block(x.x, y.x);
    to.at[1] = Block(x.y, y.y);
    return;
  }
  float4 x = four_at(left + c);
  float4 y = four_at(right + c);
  to.at[0] = Block(x.x, y.x);
  to.at[1] = Block(x.y, y.y);
  to.at[2] = Block(x.z, y.z);
  to.at[3] = Block(x.w, y.w);
}

}  // namespace forge
