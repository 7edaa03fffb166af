// How rows of an array come into threadgroup memory, and what becomes of NaN and infinity there.
#pragma once

#include "stored.h"
#include "tiles.h"

namespace forge {

// Rows of one head of an array in device memory; element 0 of row 0 is at row0.
struct HeadRows {
  Source row0;
  Int64 stride;
};

// As element_offset. Nothing here is negative, and an unsigned number needs no second register to
// say so in 64 bits.
METAL_FUNC Int64 offset_of(AttnStrides strides, Int32 b, Int32 t, Int32 head) {
  return element_offset(strides, Int64(uint(b)), Int64(uint(t)), Int64(uint(head)));
}

METAL_FUNC HeadRows head_rows(Source array, AttnStrides strides, Int32 b, Int32 head) {
  HeadRows rows;
  rows.row0 = after(array, offset_of(strides, b, 0, head));
  rows.stride = strides.row;
  return rows;
}

// Whether a row may not see a key of a tile that another row sees.
METAL_FUNC bool hides_keys() {
  return has_causal || has_window || has_runs || has_bias || has_mask;
}

// The rows of a tile that there are, of those that it has room for: [begin, end).
struct TileRows {
  Int32 begin;
  Int32 end;
};

METAL_FUNC bool holds(TileRows rows, Int32 row) { return row >= rows.begin && row < rows.end; }

METAL_FUNC bool is_full(TileRows rows, Int32 size) { return rows.begin <= 0 && rows.end >= size; }

METAL_FUNC Int32 magnitude_bits(float x) { return as_type<Int32>(x) & 0x7fffffff; }
METAL_FUNC bool is_finite(float x) { return magnitude_bits(x) < 0x7f800000; }
METAL_FUNC Int32 larger(Int32 a, Int32 b) { return a > b ? a : b; }
METAL_FUNC Int32 smaller(Int32 a, Int32 b) { return a < b ? a : b; }

// How a tile is dealt to the threads, four channels at a time: kLanes neighbouring threads have a
// row, the one of number n the quads n, n + kLanes and so on; then rows kRowsAtOnce further on. A
// thread's places differ by constants.
template <int kHd, int kRows, int kThreads>
struct StagingShape {
  enum Sizes {
    kQuads = kHd / 4,
    kEvenLanes = kQuads & -kQuads,  // the largest power of two that divides kQuads
    kLanesForOneTurn = kThreads / kRows,
    kLanes = kThreads % kQuads == 0 ? kQuads
    : kEvenLanes > kLanesForOneTurn ? kEvenLanes
                                    : kLanesForOneTurn,
    kAcross = (kQuads + kLanes - 1) / kLanes,
    kRowsAtOnce = kThreads / kLanes,
    kDown = kRows / kRowsAtOnce,
  };
  static_assert(kThreads % kLanes == 0 && kRows % kRowsAtOnce == 0,
                "every thread has as many rows");
};

// Whether a thread's quad of turn i is one of a row of kHd channels: for most turns all are.
template <int kHd, int kLanes>
METAL_FUNC bool is_quad(Int32 i, Int32 quad) {
  return (i + 1) * kLanes <= kHd / 4 || quad < kHd / 4;
}

// What is left in a tile for rows that are not there: zeros, or what other rows hold. The latter
// will do where whoever reads the tile takes nothing from what it computes of them, and adds
// nothing of them but 0 times a number, to sums that a number which is not finite has made NaN
// already.
enum AbsentRows { kAbsentRowsAreZeros, kAbsentRowsAreOthers };

// kRows rows of one head, the first at `from`, go into `tile`: all loads are sent, then everything
// is stored. Rows that are not in `rows`, which is not empty, and channels from hd on become zeros;
// what is read for them lies within the rows. Returns whether all that the lane read is finite,
// where a mask makes that matter. The vector path has offsets of 32 bits: the host sees to it that
// they fit.
template <int kHd, int kRows, int kThreads, AbsentRows kAbsent>
METAL_FUNC bool stage_rows(Source from, Int64 stride, TileRows rows, Int32 hd, uint thread_,
                           threadgroup float* tile) {
  typedef StagingShape<kHd, kRows, kThreads> Shape;
  Int32 lane = Int32(thread_ % uint(Shape::kLanes));
  Int32 first = Int32(thread_ / uint(Shape::kLanes));
  constexpr Int32 kTurns = Shape::kDown * Shape::kAcross;
  float4 values[kTurns];
#pragma clang loop unroll(full)
  for (Int32 n = 0; n < Shape::kDown; ++n) {
    Int32 there = smaller(larger(first + n * Shape::kRowsAtOnce, rows.begin), rows.end - 1);
    Source row = after(from, is_aligned ? there * Int32(stride) : there * stride);
#pragma clang loop unroll(full)
    for (Int32 i = 0; i < Shape::kAcross; ++i) {
      Int32 quad = lane + i * Shape::kLanes;
      float4 x = float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (is_quad<kHd, Shape::kLanes>(i, quad)) x = load_four(row, quad * 4, hd);
      values[n * Shape::kAcross + i] = x;
    }
  }
  if (kAbsent == kAbsentRowsAreZeros && (kTurns == 1 || !is_full(rows, kRows))) {
#pragma clang loop unroll(full)
    for (Int32 n = 0; n < kTurns; ++n) {
      bool inside = holds(rows, first + n / Shape::kAcross * Shape::kRowsAtOnce);
      values[n] = inside ? values[n] : float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
  }
  Int32 most = 0;
#pragma clang loop unroll(full)
  for (Int32 n = 0; n < Shape::kDown; ++n) {
    Int32 row = first + n * Shape::kRowsAtOnce;
#pragma clang loop unroll(full)
    for (Int32 i = 0; i < Shape::kAcross; ++i) {
      Int32 quad = lane + i * Shape::kLanes;
      float4 x = values[n * Shape::kAcross + i];
      if (hides_keys()) {
        most = larger(larger(most, magnitude_bits(x.x)), magnitude_bits(x.y));
        most = larger(larger(most, magnitude_bits(x.z)), magnitude_bits(x.w));
      }
      if (is_quad<kHd, Shape::kLanes>(i, quad)) {
        put_four(tile + row * tile_stride(kHd) + quad * 4, x);
      }
    }
  }
  return most < 0x7f800000;
}

// A simdgroup's vote, and the outcome after the next barrier: is all of the tile finite? 0 * NaN
// would reach rows that do not see the NaN. Where nothing is masked within a tile nobody asks.
METAL_FUNC void leave_vote(threadgroup Int32* votes, bool finite, uint simdgroup, uint lane) {
  if (!hides_keys()) return;
  bool all = metal::simd_all(finite);
  if (lane == 0) votes[simdgroup] = all ? 1 : 0;
}

template <int kSimdgroups>
METAL_FUNC bool unanimous(threadgroup const Int32* votes) {
  if (!hides_keys()) return true;
  Int32 count = 0;
#pragma clang loop unroll(full)
  for (Int32 n = 0; n < kSimdgroups; ++n) count += votes[n];
  return count == kSimdgroups;
}

// Without what is not finite. A product with these is the one that rows which do not see a NaN have
// without it, to the bit; with_hidden adds what the others are to have.
template <int N>
METAL_FUNC void keep_finite(thread Blocks<N>& blocks) {
#pragma clang loop unroll(full)
  for (Int32 n = 0; n < N; ++n) {
    blocks.at[n].x = is_finite(blocks.at[n].x) ? blocks.at[n].x : 0.0f;
    blocks.at[n].y = is_finite(blocks.at[n].y) ? blocks.at[n].y : 0.0f;
  }
}

template <int N>
METAL_FUNC bool all_finite(thread const Blocks<N>& blocks) {
  Int32 most = 0;
#pragma clang loop unroll(full)
  for (Int32 n = 0; n < N; ++n) {
    most = larger(larger(most, magnitude_bits(blocks.at[n].x)), magnitude_bits(blocks.at[n].y));
  }
  return most < 0x7f800000;
}

// sum + weight * value for a value that keep_finite takes out, where it is seen.
METAL_FUNC float with_hidden(float sum, float weight, float value, bool shown) {
  return shown && !is_finite(value) ? sum + weight * value : sum;
}

}  // namespace forge
