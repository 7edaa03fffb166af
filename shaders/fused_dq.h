// dq of 32 query rows, over tiles of keys.
#pragma once

#include "fused_backward.h"

namespace forge {

// What a simdgroup has of its row block: the channels of its part.
template <int N>
struct OwnedRows {
  Blocks<N> q;
  Blocks<N> dout;
  Blocks<N> dq;
  RowStatistics statistics;
  IndexRange seen;
};

struct RowArrays {
  device const float* q;
  device const float* dout;
  device const float* row_max;
  device const float* row_sum;
  device const float* d_row;
};

template <int N>
static inline OwnedRows<N> owned_rows(AttnParams params, RowTile rows, Int64 r, RowArrays arrays,
                                      Int32 channel, Lane at) {
  OwnedRows<N> own;
  set_zero(own.q);
  set_zero(own.dout);
  set_zero(own.dq);
  own.statistics.m = 0.0f;
  own.statistics.inverse_l = 0.0f;
  own.statistics.d = 0.0f;
  own.seen = nothing();
  if (r >= rows.end) return own;
  Int64 i = query_of(rows, r);
  Int64 h = head_of(rows, r);
  Int64 stat = stat_index(params, rows, r);
  load_row(arrays.q + element_offset(params.q, rows.b, i, h), channel, params.hd, at, own.q);
  load_row(arrays.dout + element_offset(params.dout, rows.b, i, h), channel, params.hd, at,
           own.dout);
  own.statistics.m = arrays.row_max[stat];
  own.statistics.inverse_l = 1.0f / arrays.row_sum[stat];
  own.statistics.d = arrays.d_row[stat];
  own.seen = visible_keys(rows.band, i);
  return own;
}

}  // namespace forge

using namespace forge;

// dq = scale * sum over the keys of ds k, for a tile of 32 rows of a kv head's group.
template <int kHd, GpuFamily kGpu = kAnyGpu, int kThreads = BackwardShape<kHd, kGpu>::kThreads>
[[kernel, max_total_threads_per_threadgroup(kThreads)]] void attention_fused_bwd_dq(
    device const float* q [[buffer(kBufferQ)]], device const float* k [[buffer(kBufferK)]],
    device const float* v [[buffer(kBufferV)]],
    device const float* row_max [[buffer(kBufferRowMax)]],
    device const float* row_sum [[buffer(kBufferRowSum)]],
    device const float* dout [[buffer(kBufferDout)]],
    device const float* d_row [[buffer(kBufferDRow)]], device float* dq [[buffer(kBufferDq)]],
    device const AttnRange* ranges [[buffer(kBufferRanges)]],
    constant AttnParams& given [[buffer(kBufferParams)]],
    constant AttnSpan& span [[buffer(kBufferSpan)]], uint tile [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  typedef BackwardShape<kHd, kGpu> Shape;
  threadgroup float k_tile[Shape::kKeyTileFloats];
  threadgroup float v_tile[Shape::kKeyTileFloats];
  threadgroup float exchange[Shape::kKeyExchangeFloats];
  threadgroup Int32 votes[Shape::kSimdgroups];
  if (span.begin + Int64(tile) >= span.end) return;
  AttnParams params = specialized(given);
  RowTile rows = row_tile(params, ranges, span.begin + Int64(tile));
  Lane at = lane_place(lane, simdgroup);
  constexpr Int32 kSlots = Shape::kRowBlocks * Shape::kKeyBlocks;
  Int32 row_block = at.simdgroup % Shape::kRowBlocks;
  Int32 part = at.simdgroup / Shape::kRowBlocks;
  Int32 channel = part * Shape::kOwnChannels;
  Int64 r = rows.first + row_block * kBlockSize + at.row;
  RowArrays arrays = {q, dout, row_max, row_sum, d_row};
  OwnedRows<Shape::kOwnBlocks> own =
      owned_rows<Shape::kOwnBlocks>(params, rows, r, arrays, channel, at);
  HeadRows k_head = head_rows(k, params.k, rows.b, rows.kv_head);
  HeadRows v_head = head_rows(v, params.v, rows.b, rows.kv_head);
  SeenRange seen = keys_of_rows(rows, rows.first + row_block * kBlockSize, kBlockSize);
  IndexRange keys = keys_of_rows(rows, rows.first, kQueryRows).any;

  KeyTile keys_at;
  keys_at.seen = own.seen;
  for (keys_at.first = keys.begin; keys_at.first < keys.end; keys_at.first += Shape::kKeys) {
    if (keys_at.first > keys.begin) metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    bool k_finite = stage_rows<kHd, Shape::kKeys, Shape::kSimdgroups>(k_head, keys, keys_at.first,
                                                                      params.hd, at, k_tile);
    stage_rows<kHd, Shape::kKeys, Shape::kSimdgroups>(v_head, keys, keys_at.first, params.hd, at,
                                                      v_tile);
    leave_vote(votes, k_finite, at);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

    keys_at.span = block_span(seen, keys_at.first, Shape::kKeyBlocks);
    Products products[Shape::kKeyBlocks];
#pragma unroll
    for (Int32 b = 0; b < Shape::kKeyBlocks; ++b) {
      if (!holds(keys_at.span, b)) continue;
      Int32 offset = b * kBlockSize * Shape::kStride + channel;
      products[b].s = dot_rows(own.q, k_tile + offset, Shape::kStride, at);
      products[b].dp = dot_rows(own.dout, v_tile + offset, Shape::kStride, at);
      if (Shape::kParts > 1) {
        leave_products(exchange, part, kSlots, row_block * Shape::kKeyBlocks + b, at, products[b]);
      }
    }
    if (Shape::kParts > 1) metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (keys_at.span.from >= keys_at.span.to) continue;

    keys_at.finite = unanimous<Shape::kSimdgroups>(votes);
    Blocks<Shape::kKeyBlocks> ds;
#pragma unroll
    for (Int32 b = 0; b < Shape::kKeyBlocks; ++b) {
      if (!holds(keys_at.span, b)) continue;
      if (Shape::kParts > 1) {
        products[b] =
            add_products<Shape::kParts>(exchange, kSlots, row_block * Shape::kKeyBlocks + b, at);
      }
      ds.at[b] = gradients_of(params, products[b], own.statistics).ds;
      if (needs_mask(keys_at.span, b)) ds.at[b] = where(shown_of(keys_at, b, at), ds.at[b], 0.0f);
    }
#pragma unroll
    for (Int32 n = 0; n < Shape::kOwnBlocks; ++n) {
      own.dq.at[n] +=
          times_tile(ds, keys_at, k_tile + channel + n * kBlockSize, Shape::kStride, at);
    }
  }

  if (r >= rows.end) return;
  device float* dq_row =
      dq + element_offset(params.dq, rows.b, query_of(rows, r), head_of(rows, r));
#pragma unroll
  for (Int32 n = 0; n < Shape::kOwnBlocks; ++n) {
    Int32 c = channel + n * kBlockSize + at.column;
    Block x = own.dq.at[n] * params.scale;
    if (accumulate) x += load_pair(dq_row, c, params.hd);
    store_pair(dq_row, c, params.hd, x);
  }
}
