// dk and dv of 32 keys, over tiles of the query rows that see them, head after head of the group.
#pragma once

#include "fused_backward.h"

namespace forge {

// What a simdgroup has of its 8 keys: the channels of its part, a lane two keys of one channel. k
// and v are right operands, dk and dv transposed.
template <int N>
struct OwnedKeys {
  Blocks<N> k;
  Blocks<N> v;
  Blocks<N> dk;
  Blocks<N> dv;
};

template <int N>
static inline void load_columns(HeadRows head, Int64 key, Int64 length, Int32 channel, Int32 hd,
                                thread Blocks<N>& to) {
#pragma unroll
  for (Int32 n = 0; n < N; ++n) {
    Int32 c = channel + n * kBlockSize;
    to.at[n].x = c < hd && key < length ? head.row0[key * head.stride + c] : 0.0f;
    to.at[n].y = c < hd && key + 1 < length ? head.row0[(key + 1) * head.stride + c] : 0.0f;
  }
}

// x = x * scale, or that added to what the rows hold.
template <int N>
static inline void store_columns(thread const Blocks<N>& x, float scale, device float* row,
                                 Int32 channel, Int32 hd, bool second) {
#pragma unroll
  for (Int32 n = 0; n < N; ++n) {
    Int32 c = channel + n * kBlockSize;
    if (c >= hd) continue;
    float value = (second ? x.at[n].y : x.at[n].x) * scale;
    row[c] = accumulate ? row[c] + value : value;
  }
}

// a . b of a row block of a tile with 8 keys: dot_rows with the tile on the left.
template <int N>
static inline Block dot_keys(threadgroup const float* tile, Int32 stride, thread const Blocks<N>& b,
                             Lane at) {
  Block sum = Block(0.0f, 0.0f);
#pragma unroll
  for (Int32 n = 0; n < N; ++n) {
    sum = multiply_add(load_block(tile + n * kBlockSize, stride, at), b.at[n], sum);
  }
  return sum;
}

// A tile of query rows of one head, as 8 keys see it.
struct QueryTile {
  Int64 first;  // query
  Int64 Tq;
  AttnBand band;
  BlockSpan span;  // of the keys
  Int64 key;       // the lane's first
  bool finite;     // q and dout
};

static inline Shown shown_of(QueryTile tile, Int32 block, Lane at) {
  Int64 i = tile.first + block * kBlockSize + at.row;
  return shown_keys(i < tile.Tq ? visible_keys(tile.band, i) : nothing(), tile.key);
}

// 8 channels of the tile's rows, transposed, times p; `channels` starts at the first.
template <int N>
static inline Block tile_times(threadgroup const float* channels, Int32 stride, QueryTile tile,
                               thread const Blocks<N>& p, Lane at) {
  Block sum = Block(0.0f, 0.0f);
#pragma unroll
  for (Int32 b = 0; b < N; ++b) {
    if (!holds(tile.span, b)) continue;
    threadgroup const float* from = channels + b * kBlockSize * stride;
    if (tile.finite || !needs_mask(tile.span, b)) {
      sum = multiply_add(load_transposed(from, stride, at), p.at[b], sum);
    } else {
      sum = add_shown_columns(from, stride, p.at[b], shown_of(tile, b, at), at, sum);
    }
  }
  return sum;
}

}  // namespace forge

using namespace forge;

// dv = sum of p dout and dk = scale * sum of ds q, for a tile of 32 keys of a kv head.
template <int kHd, GpuFamily kGpu = kAnyGpu, int kThreads = BackwardShape<kHd, kGpu>::kThreads>
[[kernel, max_total_threads_per_threadgroup(kThreads)]] void attention_fused_bwd_dkv(
    device const float* q [[buffer(kBufferQ)]], device const float* k [[buffer(kBufferK)]],
    device const float* v [[buffer(kBufferV)]],
    device const float* row_max [[buffer(kBufferRowMax)]],
    device const float* row_sum [[buffer(kBufferRowSum)]],
    device const float* dout [[buffer(kBufferDout)]],
    device const float* d_row [[buffer(kBufferDRow)]], device float* dk [[buffer(kBufferDk)]],
    device float* dv [[buffer(kBufferDv)]],
    device const AttnRange* ranges [[buffer(kBufferRanges)]],
    constant AttnParams& given [[buffer(kBufferParams)]],
    constant AttnSpan& span [[buffer(kBufferSpan)]], uint tile [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  typedef BackwardShape<kHd, kGpu> Shape;
  threadgroup float q_tile[Shape::kRowTileFloats];
  threadgroup float dout_tile[Shape::kRowTileFloats];
  threadgroup RowStatistics statistics[Shape::kRows];
  threadgroup float exchange[Shape::kRowExchangeFloats];
  threadgroup Int32 votes[Shape::kSimdgroups];
  if (span.begin + Int64(tile) >= span.end) return;
  AttnParams params = specialized(given);
  Lane at = lane_place(lane, simdgroup);
  Int64 tiles = tiles_of(params.Tk);
  Int64 b = (span.begin + Int64(tile)) / (tiles * params.Hkv);
  Int64 kv_head = (span.begin + Int64(tile)) / tiles % params.Hkv;
  Int64 first_key = (span.begin + Int64(tile)) % tiles * kOwnedKeys;
  Int64 rep = params.H / params.Hkv;
  constexpr Int32 kKeyBlocks = kOwnedKeys / kBlockSize;
  constexpr Int32 kSlots = kKeyBlocks * Shape::kRowTileBlocks;
  Int32 key_block = at.simdgroup % kKeyBlocks;
  Int32 part = at.simdgroup / kKeyBlocks;
  Int32 channel = part * Shape::kOwnChannels;

  QueryTile rows;
  rows.Tq = params.Tq;
  rows.band = attn_band(params, ranges[b]);
  rows.key = first_key + key_block * kBlockSize + at.column;
  OwnedKeys<Shape::kOwnBlocks> own;
  load_columns(head_rows(k, params.k, b, kv_head), rows.key, params.Tk, channel + at.row, params.hd,
               own.k);
  load_columns(head_rows(v, params.v, b, kv_head), rows.key, params.Tk, channel + at.row, params.hd,
               own.v);
  set_zero(own.dk);
  set_zero(own.dv);
  SeenRange seen =
      queries_of_keys(rows.band, params.Tq, first_key + key_block * kBlockSize, kBlockSize);
  IndexRange queries = queries_of_keys(rows.band, params.Tq, first_key, kOwnedKeys).any;

  bool fresh = true;
  for (Int64 h = kv_head * rep; h < (kv_head + 1) * rep; ++h) {
    HeadRows q_head = head_rows(q, params.q, b, h);
    HeadRows dout_head = head_rows(dout, params.dout, b, h);
    for (rows.first = queries.begin; rows.first < queries.end; rows.first += Shape::kRows) {
      if (!fresh) metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      fresh = false;
      bool q_finite = stage_rows<kHd, Shape::kRows, Shape::kSimdgroups>(q_head, queries, rows.first,
                                                                        params.hd, at, q_tile);
      bool dout_finite = stage_rows<kHd, Shape::kRows, Shape::kSimdgroups>(
          dout_head, queries, rows.first, params.hd, at, dout_tile);
      leave_vote(votes, q_finite && dout_finite, at);
      Int64 i = rows.first + at.lane;
      if (at.simdgroup == 0 && at.lane < Shape::kRows) {
        RowStatistics row = {0.0f, 0.0f, 0.0f};
        if (i < queries.end) {
          Int64 stat = (b * params.H + h) * params.Tq + i;
          row.m = row_max[stat];
          row.inverse_l = 1.0f / row_sum[stat];
          row.d = d_row[stat];
        }
        statistics[at.lane] = row;
      }
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

      rows.span = block_span(seen, rows.first, Shape::kRowTileBlocks);
      Products products[Shape::kRowTileBlocks];
#pragma unroll
      for (Int32 n = 0; n < Shape::kRowTileBlocks; ++n) {
        if (!holds(rows.span, n)) continue;
        Int32 offset = n * kBlockSize * Shape::kStride + channel;
        products[n].s = dot_keys(q_tile + offset, Shape::kStride, own.k, at);
        products[n].dp = dot_keys(dout_tile + offset, Shape::kStride, own.v, at);
        if (Shape::kParts > 1) {
          leave_products(exchange, part, kSlots, key_block * Shape::kRowTileBlocks + n, at,
                         products[n]);
        }
      }
      if (Shape::kParts > 1) metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      if (rows.span.from >= rows.span.to) continue;

      rows.finite = unanimous<Shape::kSimdgroups>(votes);
      Blocks<Shape::kRowTileBlocks> p;
      Blocks<Shape::kRowTileBlocks> ds;
#pragma unroll
      for (Int32 n = 0; n < Shape::kRowTileBlocks; ++n) {
        if (!holds(rows.span, n)) continue;
        if (Shape::kParts > 1) {
          products[n] = add_products<Shape::kParts>(exchange, kSlots,
                                                    key_block * Shape::kRowTileBlocks + n, at);
        }
        RowStatistics row = statistics[n * kBlockSize + at.row];
        Gradients gradients = gradients_of(params, products[n], row);
        if (needs_mask(rows.span, n)) {
          Shown shown = shown_of(rows, n, at);
          gradients.p = where(shown, gradients.p, 0.0f);
          gradients.ds = where(shown, gradients.ds, 0.0f);
        }
        p.at[n] = gradients.p;
        ds.at[n] = gradients.ds;
      }
#pragma unroll
      for (Int32 n = 0; n < Shape::kOwnBlocks; ++n) {
        Int32 at_channel = channel + n * kBlockSize;
        own.dv.at[n] += tile_times(dout_tile + at_channel, Shape::kStride, rows, p, at);
        own.dk.at[n] += tile_times(q_tile + at_channel, Shape::kStride, rows, ds, at);
      }
    }
  }

  for (Int64 second = 0; second < 2; ++second) {
    Int64 key = rows.key + second;
    if (key >= params.Tk) continue;
    device float* dk_row = dk + element_offset(params.dk, b, key, kv_head);
    device float* dv_row = dv + element_offset(params.dv, b, key, kv_head);
    store_columns(own.dk, params.scale, dk_row, channel + at.row, params.hd, second != 0);
    store_columns(own.dv, 1.0f, dv_row, channel + at.row, params.hd, second != 0);
  }
}
