// dq of 32 query rows, over tiles of keys.
#pragma once

#include "fused_backward.h"

namespace forge {

template <int kHd, GpuFamily kGpu>
struct DqShape {
  enum Sizes {
    kSimdgroups = dq_simdgroups(fused_tiling(kGpu, kHd)),
    kThreads = kSimdgroups * kSimdgroupWidth,
    kRowBlocks = kQueryRows / kBlockSize,
    kKeys = fused_tiling(kGpu, kHd).dq_keys,
    kKeyBlocks = kKeys / kBlockSize,
    kTileFloats = tile_floats(kKeys, kHd),
    kExchangePairs = exchange_pairs(BackwardShape<kHd, kGpu>::kParts, kQueryRows, kKeys, 2),
  };
};

// Where block `slot` of `slots` of a part has its two products in the exchange, s and dp.
METAL_FUNC Int32 products_slot(Int32 part, Int32 slots, Int32 slot) {
  return 2 * (part * slots + slot);
}

template <int kParts>
METAL_FUNC Products add_products(threadgroup const float* exchange, Int32 slots, Int32 slot,
                                 uint lane) {
  Int32 from = products_slot(0, slots, slot);
  Products products;
  products.s = sum_of_parts<kParts>(exchange, from, 2 * slots, lane);
  products.dp = sum_of_parts<kParts>(exchange, from + 1, 2 * slots, lane);
  return products;
}

// What a simdgroup has of its row block: the channels of its part.
template <int N>
struct OwnedRows {
  Blocks<N> q;
  Blocks<N> dout;
  Blocks<N> dq;
  RowStatistics statistics;
  Range seen;  // by the lane's row
};

// dq += ds times 8 keys of a tile, from the run of channels on.
template <int N>
METAL_FUNC void add_keys(Block ds, Sight seen, Int32 key, threadgroup const float* keys,
                         Int32 stride, bool finite, Lane at, thread OwnedRows<N>& own) {
  threadgroup const float* row = keys + at.row * stride;
  Blocks<N> k;
  load_row(row, at, k);
  if (!finite) keep_finite(k);
#pragma clang loop unroll(full)
  for (Int32 n = 0; n < N; ++n) {
    own.dq.at[n] += multiply_add(ds, k.at[n], Block(0.0f, 0.0f));
  }
  if (!finite) add_hidden_rows(ds, seen, key, row, stride, at, own.dq);
}

}  // namespace forge

using namespace forge;

// dq = scale * sum over the keys of ds k, for a tile of 32 rows of a kv head's group.
template <int kHd, GpuFamily kGpu = kAnyGpu, int kThreads = DqShape<kHd, kGpu>::kThreads>
[[kernel, max_total_threads_per_threadgroup(kThreads)]] void attention_fused_bwd_dq(
    device const uchar* q [[buffer(kBufferQ)]], device const uchar* k [[buffer(kBufferK)]],
    device const uchar* v [[buffer(kBufferV)]],
    device const float* row_max [[buffer(kBufferRowMax)]],
    device const float* row_sum [[buffer(kBufferRowSum)]],
    device const uchar* dout [[buffer(kBufferDout)]],
    device const float* d_row [[buffer(kBufferDRow)]], device uchar* dq [[buffer(kBufferDq)]],
    device const uchar* bias [[buffer(kBufferBias), function_constant(has_bias)]],
    device const uchar* mask [[buffer(kBufferMask), function_constant(has_mask)]],
    device const uchar* sinks [[buffer(kBufferSinks), function_constant(has_sinks)]],
    device const float* o [[buffer(kBufferO), function_constant(has_sinks)]],
    device const AttnRange* ranges [[buffer(kBufferRanges)]],
    constant AttnParams& params [[buffer(kBufferParams)]],
    constant AttnGrid& grid [[buffer(kBufferGrid)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  typedef BackwardShape<kHd, kGpu> Shape;
  typedef DqShape<kHd, kGpu> Sizes;
  threadgroup float4 tiles[2 * Sizes::kTileFloats / 4];
  threadgroup float2 pairs[Sizes::kExchangePairs];
  threadgroup Int32 votes[Sizes::kSimdgroups];
  threadgroup float* k_tile = reinterpret_cast<threadgroup float*>(tiles);
  threadgroup float* exchange = reinterpret_cast<threadgroup float*>(pairs);
  RowGroup rows = row_group(params, grid, ranges, group);
  Lane at = lane_place(lane);
  uint thread_ = simdgroup * kSimdgroupWidth + lane;
  constexpr Int32 kSlots = Sizes::kRowBlocks * Sizes::kKeyBlocks;
  Int32 row_block = Int32(simdgroup % Sizes::kRowBlocks);
  Int32 part = Shape::kParts > 1 ? Int32(simdgroup / Sizes::kRowBlocks) : 0;
  Int32 channel = part * Shape::kOwnChannels;
  Int32 first_row = (grid.tile + Int32(group.x)) * kQueryRows;
  Int32 r = first_row + row_block * kBlockSize + at.row;
  bool exists = r < rows.end;
  RowPlace place = row_place(rows, exists ? r : rows.end - 1);
  Int64 stat = stat_index(params, rows.b, place.head, place.query);
  ScoreOptions options = score_options(params, grid);
  TileSights sights = sights_of_tile(params, ranges, rows, first_row, row_block, at, lane);
  Range keys = sights.tile;
  Range seen = sights.block;
  PairArrays arrays = {source(q, is_half_bias), q};
  if (has_bias) arrays.bias = source(bias, is_half_bias);
  if (has_mask) arrays.mask = mask;
  PairRow pair_arrays = pair_row(params, arrays, rows.b, place.head, place.query);
  HeadRows k_rows = head_rows(source(k, is_half_kv), params.k, rows.b, rows.kv_head);
  HeadRows v_rows = head_rows(source(v, is_half_kv), params.v, rows.b, rows.kv_head);
  Target dq_row =
      after(target(dq, is_half_dq), offset_of(params.dq, rows.b, place.query, place.head));
  OwnedRows<Shape::kOwnBlocks> own;
  load_row(after(source(q, is_half_q), offset_of(params.q, rows.b, place.query, place.head)),
           channel, params.hd, at, own.q);
  load_row(after(source(dout, is_half_q), offset_of(params.dout, rows.b, place.query, place.head)),
           channel, params.hv, at, own.dout);
  set_zero(own.dq);
  own.statistics = row_statistics(row_max[stat], row_sum[stat], d_row[stat]);
  if (has_sinks) {
    SinkRows sink_rows = {source(sinks, is_half_sinks), o};
    bool alone = is_sink_alone(params, sink_rows, rows.b, place.head, place.query, row_max[stat],
                               row_sum[stat]);
    if (alone) own.statistics.inverse_l = INFINITY;
  }
  own.seen = sights.own;

  Source k_from = after(k_rows.row0, keys.begin * k_rows.stride);
  Source v_from = after(v_rows.row0, keys.begin * v_rows.stride);
  for (Int32 first = keys.begin; first < keys.end; first += Sizes::kKeys) {
    TileRows present = {0, keys.end - first};
    bool finite = stage_rows<kHd, Sizes::kKeys, Sizes::kThreads, kAbsentRowsAreOthers>(
        k_from, k_rows.stride, present, params.hd, thread_, k_tile);
    leave_vote(votes, finite, simdgroup, lane);
    stage_rows<kHd, Sizes::kKeys, Sizes::kThreads, kAbsentRowsAreOthers>(
        v_from, v_rows.stride, present, params.hv, thread_, k_tile + Sizes::kTileFloats);
    k_from = after(k_from, Sizes::kKeys * k_rows.stride);
    v_from = after(v_from, Sizes::kKeys * v_rows.stride);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

    BlockSpan span = block_span(seen, own.seen, own.seen, first, Sizes::kKeys);
    finite = span.whole || unanimous<Sizes::kSimdgroups>(votes);
    // One block of keys after another: what a block needs stays in registers, where simdgroups have
    // to exchange their parts of it in threadgroup memory.
    constexpr Int32 kBlockFloats = kBlockSize * Shape::kStride;
    threadgroup const float* k_block = k_tile + span.from * kBlockFloats + channel;
    if (Shape::kParts > 1) {
      // All of s, then all of dp: both at once would keep twice the operands in registers.
      Int32 slot = products_slot(part, kSlots, row_block * Sizes::kKeyBlocks);
      threadgroup const float* block = k_block;
#pragma clang loop unroll(disable)
      for (Int32 b = span.from; b < span.to; ++b, block += kBlockFloats) {
        leave_block(exchange, slot + 2 * b, lane, dot_rows(own.q, block, Shape::kStride, at));
      }
      block = k_block + Sizes::kTileFloats;
#pragma clang loop unroll(disable)
      for (Int32 b = span.from; b < span.to; ++b, block += kBlockFloats) {
        leave_block(exchange, slot + 2 * b + 1, lane,
                    dot_rows(own.dout, block, Shape::kStride, at));
      }
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
#pragma clang loop unroll(disable)
    for (Int32 b = span.from; b < span.to; ++b, k_block += kBlockFloats) {
      Int32 key = first + b * kBlockSize;
      Products products;
      if (Shape::kParts > 1) {
        products =
            add_products<Shape::kParts>(exchange, kSlots, row_block * Sizes::kKeyBlocks + b, lane);
      } else {
        products.s = dot_rows(own.q, k_block, Shape::kStride, at);
        products.dp = dot_rows(own.dout, k_block + Sizes::kTileFloats, Shape::kStride, at);
      }
      PairBlock block = {0u, Block(0.0f, 0.0f)};
      if (hides_pairs()) block = pair_block(pair_arrays, own.seen, key + at.column);
      Block ds = gradients_of(options, products, block.bias, own.statistics).ds;
      if (hides_pairs()) {
        ds = where_shown(block.bits, ds, 0.0f);
      } else if (!span.whole) {
        ds = where_seen(own.seen, key + at.column, ds, 0.0f);
      }
      add_keys(ds, sight_of(own.seen, block.bits), key, k_block, Shape::kStride, finite, at, own);
    }
    if (first + Sizes::kKeys < keys.end) {
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    }
  }

  if (!exists) return;
  Blocks<Shape::kOwnBlocks> before;
  set_zero(before);
  if (accumulate) load_row(source(dq_row), channel, params.hd, at, before);
#pragma clang loop unroll(full)
  for (Int32 n = 0; n < Shape::kOwnBlocks; ++n) {
    Block x = Block(own.dq.at[n].x * params.scale, own.dq.at[n].y * params.scale);
    if (!is_live(own.statistics)) x = Block(0.0f, 0.0f);
    own.dq.at[n] = accumulate ? before.at[n] + x : x;
  }
  store_row(dq_row, channel, params.hd, at, own.dq);
}
