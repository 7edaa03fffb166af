// The forward of 32 query rows: online softmax over tiles of keys.
#pragma once

#include "fused.h"
#include "shared/buffer_indices.h"

namespace forge {

template <int kHd, GpuFamily kGpu>
struct ForwardShape {
  enum Sizes {
    kKeys = fused_tiling(kGpu, kHd).forward_keys,
    kKeyBlocks = kKeys / kBlockSize,
    kParts = fused_tiling(kGpu, kHd).forward_parts,  // simdgroups a row block
    kRuns = fused_tiling(kGpu, kHd).parts / kParts,  // runs of channels a simdgroup
    kRunBlocks = kHd / fused_tiling(kGpu, kHd).parts / kBlockSize,
    kOwnBlocks = kRuns * kRunBlocks,
    kSimdgroups = forward_simdgroups(fused_tiling(kGpu, kHd)),
    kThreads = kSimdgroups * kSimdgroupWidth,
    kRowBlocks = kQueryRows / kBlockSize,
    kStride = tile_stride(kHd),
    kTileFloats = tile_floats(kKeys, kHd),
    kExchangeFloats = exchange_floats(kParts, kQueryRows, kKeys, 1),
  };
};

struct ForwardArrays {
  device const float* q;
  device const float* k;
  device const float* v;
};

// Threadgroup memory.
struct ForwardMemory {
  threadgroup float* k;
  threadgroup float* v;
  threadgroup float* exchange;
  threadgroup Int32* votes;
};

// What a simdgroup keeps of its row block: the running sums of the lane's row.
template <int N>
struct OnlineSoftmax {
  Blocks<N> o;  // sum of exp(s - m) v, in the channels that this simdgroup has
  float m;
  float l;
};

// dots = q . k over the channels that this simdgroup has.
template <int kHd, GpuFamily kGpu>
static inline void multiply_keys(thread const Blocks<ForwardShape<kHd, kGpu>::kRunBlocks>* q,
                                 threadgroup const float* k, KeyTile tile, Lane at,
                                 thread Blocks<ForwardShape<kHd, kGpu>::kKeyBlocks>& dots) {
  typedef ForwardShape<kHd, kGpu> Shape;
#pragma unroll
  for (Int32 b = 0; b < Shape::kKeyBlocks; ++b) {
    if (!holds(tile.span, b)) continue;
    threadgroup const float* keys = k + b * kBlockSize * Shape::kStride;
    Block sum = dot_rows(q[0], keys, Shape::kStride, at);
#pragma unroll
    for (Int32 run = 1; run < Shape::kRuns; ++run) {
      sum += dot_rows(q[run], keys + run * Shape::kRunBlocks * kBlockSize, Shape::kStride, at);
    }
    dots.at[b] = sum;
  }
}

// Dot products become exp(s - m) with the new maximum; m and l move on. Returns what the sums so
// far are to be multiplied with.
template <int N>
static inline float softmax_step(AttnParams params, KeyTile tile, Lane at, thread Blocks<N>& p,
                                 thread float& m, thread float& l) {
  float top = -INFINITY;
#pragma unroll
  for (Int32 b = 0; b < N; ++b) {
    if (!holds(tile.span, b)) continue;
    Block s = scores_of(p.at[b], params.scale, params.softcap).s;
    if (needs_mask(tile.span, b)) s = where(shown_of(tile, b, at), s, -INFINITY);
    p.at[b] = s;
    top = larger(s.x, larger(s.y, top));
  }
  float m_before = m;
  m = larger(row_max(top), m_before);
  // A row of nothing but -inf so far: any finite base gives 0 where -inf - -inf would give NaN.
  float base = m == -INFINITY ? 0.0f : m;
  Block sum = Block(0.0f, 0.0f);
#pragma unroll
  for (Int32 b = 0; b < N; ++b) {
    if (!holds(tile.span, b)) continue;
    p.at[b] = exp_of(p.at[b] - base);
    sum += p.at[b];
  }
  float alpha = exp_of(m_before - base);
  l = metal::fma(l, alpha, row_sum(sum));
  return alpha;
}

// The row tile against the keys `keys`: two barriers a tile. While one of k and v is
// used the other is staged.
template <int kHd, GpuFamily kGpu>
static inline OnlineSoftmax<ForwardShape<kHd, kGpu>::kOwnBlocks> attend(
    AttnParams params, RowTile rows, IndexRange keys, ForwardArrays arrays, ForwardMemory memory,
    Lane at) {
  typedef ForwardShape<kHd, kGpu> Shape;
  Int32 row_block = at.simdgroup % Shape::kRowBlocks;
  Int32 part = at.simdgroup / Shape::kRowBlocks;
  Int32 channel = part * Shape::kOwnBlocks * kBlockSize;
  Int64 r = rows.first + row_block * kBlockSize + at.row;
  HeadRows k = head_rows(arrays.k, params.k, rows.b, rows.kv_head);
  HeadRows v = head_rows(arrays.v, params.v, rows.b, rows.kv_head);
  SeenRange seen = keys_of_rows(rows, rows.first + row_block * kBlockSize, kBlockSize);
  Blocks<Shape::kRunBlocks> q[Shape::kRuns];
  OnlineSoftmax<Shape::kOwnBlocks> state;
  KeyTile tile;
  tile.seen = nothing();
#pragma unroll
  for (Int32 run = 0; run < Shape::kRuns; ++run) set_zero(q[run]);
  if (r < rows.end) {
    Int64 i = query_of(rows, r);
    device const float* row = arrays.q + element_offset(params.q, rows.b, i, head_of(rows, r));
    tile.seen = visible_keys(rows.band, i);
#pragma unroll
    for (Int32 run = 0; run < Shape::kRuns; ++run) {
      load_row(row, channel + run * Shape::kRunBlocks * kBlockSize, params.hd, at, q[run]);
    }
  }
  set_zero(state.o);
  state.m = -INFINITY;
  state.l = 0.0f;
  if (is_empty(keys)) return state;

  stage_rows<kHd, Shape::kKeys, Shape::kSimdgroups>(k, keys, keys.begin, params.hd, at, memory.k);
  metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  for (tile.first = keys.begin;; tile.first += Shape::kKeys) {
    Int64 next = tile.first + Shape::kKeys;
    tile.span = block_span(seen, tile.first, Shape::kKeyBlocks);
    leave_vote(memory.votes,
               stage_rows<kHd, Shape::kKeys, Shape::kSimdgroups>(v, keys, tile.first, params.hd, at,
                                                                 memory.v),
               at);
    Blocks<Shape::kKeyBlocks> p;
    multiply_keys<kHd, kGpu>(q, memory.k + channel, tile, at, p);
    if (Shape::kParts > 1) {
#pragma unroll
      for (Int32 b = 0; b < Shape::kKeyBlocks; ++b) {
        if (!holds(tile.span, b)) continue;
        leave_block(memory.exchange, at.simdgroup * Shape::kKeyBlocks + b, at, p.at[b]);
      }
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (next < keys.end) {
      stage_rows<kHd, Shape::kKeys, Shape::kSimdgroups>(k, keys, next, params.hd, at, memory.k);
    }
    if (tile.span.from < tile.span.to) {
      if (Shape::kParts > 1) {
#pragma unroll
        for (Int32 b = 0; b < Shape::kKeyBlocks; ++b) {
          if (!holds(tile.span, b)) continue;
          p.at[b] = sum_of_parts<Shape::kParts>(memory.exchange, row_block * Shape::kKeyBlocks + b,
                                                Shape::kRowBlocks * Shape::kKeyBlocks, at);
        }
      }
      tile.finite = unanimous<Shape::kSimdgroups>(memory.votes);
      float alpha = softmax_step(params, tile, at, p, state.m, state.l);
#pragma unroll
      for (Int32 n = 0; n < Shape::kOwnBlocks; ++n) {
        Block pv = times_tile(p, tile, memory.v + channel + n * kBlockSize, Shape::kStride, at);
        state.o.at[n] = metal::fma(state.o.at[n], Block(alpha, alpha), pv);
      }
    }
    if (next >= keys.end) return state;
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
}

}  // namespace forge

using namespace forge;

// A tile of 32 rows of a kv head's group.
template <int kHd, GpuFamily kGpu = kAnyGpu, int kThreads = ForwardShape<kHd, kGpu>::kThreads>
[[kernel, max_total_threads_per_threadgroup(kThreads)]] void attention_fused_fwd(
    device const float* q [[buffer(kBufferQ)]], device const float* k [[buffer(kBufferK)]],
    device const float* v [[buffer(kBufferV)]], device float* o [[buffer(kBufferO)]],
    device float* row_max [[buffer(kBufferRowMax)]],
    device float* row_sum [[buffer(kBufferRowSum)]],
    device const AttnRange* ranges [[buffer(kBufferRanges)]],
    constant AttnParams& given [[buffer(kBufferParams)]],
    constant AttnSpan& span [[buffer(kBufferSpan)]], uint tile [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  typedef ForwardShape<kHd, kGpu> Shape;
  threadgroup float k_tile[Shape::kTileFloats];
  threadgroup float v_tile[Shape::kTileFloats];
  threadgroup float exchange[Shape::kExchangeFloats];
  threadgroup Int32 votes[Shape::kSimdgroups];
  if (span.begin + Int64(tile) >= span.end) return;
  AttnParams params = specialized(given);
  RowTile rows = row_tile(params, ranges, span.begin + Int64(tile));
  Lane at = lane_place(lane, simdgroup);
  ForwardArrays arrays = {q, k, v};
  ForwardMemory memory = {k_tile, v_tile, exchange, votes};
  IndexRange keys = keys_of_rows(rows, rows.first, kQueryRows).any;
  OnlineSoftmax<Shape::kOwnBlocks> state =
      attend<kHd, kGpu>(params, rows, keys, arrays, memory, at);

  Int64 r = rows.first + at.simdgroup % Shape::kRowBlocks * kBlockSize + at.row;
  Int32 part = at.simdgroup / Shape::kRowBlocks;
  if (r >= rows.end) return;
  IndexRange seen = visible_keys(rows.band, query_of(rows, r));
  bool live = !is_empty(seen);
  float l = live ? state.l : 0.0f;
  if (live && l == 0.0f) l = NAN;  // all visible scores are -inf
  if (part == 0 && at.column == 0) {
    row_max[stat_index(params, rows, r)] = live ? state.m : -INFINITY;
    row_sum[stat_index(params, rows, r)] = l;
  }
  float inverse = 1.0f / l;
  device float* o_row = o + element_offset(params.o, rows.b, query_of(rows, r), head_of(rows, r));
#pragma unroll
  for (Int32 n = 0; n < Shape::kOwnBlocks; ++n) {
    Int32 c = (part * Shape::kOwnBlocks + n) * kBlockSize + at.column;
    store_pair(o_row, c, params.hd, live ? state.o.at[n] * inverse : Block(0.0f, 0.0f));
  }
}
