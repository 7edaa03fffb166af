// dk and dv of 32 keys, over tiles of the query rows that see them, head after head of the group.
#pragma once

#include "fused_backward.h"

namespace forge {

// A block of keys has two simdgroups a part: one has k and sums dv, the other has v and sums dk.
// Each multiplies one of q and dout with what it has, and the other one with what came of it: s and
// dp go from one to the other through threadgroup memory. So a lane keeps two operands, not four.
enum Role { kSumsDv = 0, kSumsDk = 1, kRoles = 2 };

template <int kHd, GpuFamily kGpu>
struct DkvShape {
  enum Sizes {
    kKeys = fused_tiling(kGpu, kHd).dkv_keys,
    kKeyBlocks = kKeys / kBlockSize,
    kSimdgroups = dkv_simdgroups(fused_tiling(kGpu, kHd)),
    kThreads = kSimdgroups * kSimdgroupWidth,
    kRows = fused_tiling(kGpu, kHd).dkv_rows,
    kRowBlocks = kRows / kBlockSize,
    kTileFloats = tile_floats(kRows, kHd),
    kExchangePairs = dkv_exchange_pairs(fused_tiling(kGpu, kHd)),
    kSlots = kKeyBlocks * kRowBlocks,  // of one part and role in the exchange
  };
};

// What a simdgroup has of its 8 keys: the channels of its part, a lane two keys of one channel of
// each block. Right operands are k or v, sums dv or dk, transposed.
template <int N>
struct OwnedKeys {
  Blocks<N> right;
  Blocks<N> sums;
  Range left_seen;   // the queries that see the first of the lane's keys,
  Range right_seen;  // and the second
};

// Whether a block of pairs is to be asked for each of them.
METAL_FUNC bool asks_pairs() { return has_runs || hides_pairs(); }

// Whether query i has a range that holds one of the keys.
METAL_FUNC bool query_sees(constant AttnParams& params, device const AttnRange* ranges, Int32 b,
                           Int32 i, Range keys) {
  if (i >= Int32(params.Tq)) return false;
  Range seen = visible_keys(band_of(params, range_of(params, ranges, b, i)), i);
  return !is_empty(seen) && seen.begin < keys.end && seen.end > keys.begin;
}

// From the first to the last query that sees any of the keys, where each has a range of its own.
METAL_FUNC Range queries_with_runs(constant AttnParams& params, device const AttnRange* ranges,
                                   Int32 b, Range keys, uint lane) {
  Range found = {Int32(params.Tq), 0};
  for (Int32 i = Int32(lane); i < Int32(params.Tq); i += kSimdgroupWidth) {
    if (!query_sees(params, ranges, b, i, keys)) continue;
    found.begin = smaller(found.begin, i);
    found.end = i + 1;
  }
  return hull_of_lanes(found);
}

// One of the two columns into its row: x * scale, or that added to what the row holds. A key that
// nobody sees has no gradient, whatever x is.
template <int N>
METAL_FUNC void store_column(thread const Blocks<N>& x, bool second, float scale, bool live,
                             Target row, Int32 channel, Int32 hd, Lane at) {
#pragma clang loop unroll(full)
  for (Int32 first = 0; first < N; first += 4) {
    Int32 size = group_size<N>(first);
    Int32 c = channel + first * kBlockSize + size * at.row;
    float4 values = float4(0.0f, 0.0f, 0.0f, 0.0f);
    values.x = (second ? x.at[first].y : x.at[first].x) * scale;
    if (size > 1) values.y = (second ? x.at[first + 1].y : x.at[first + 1].x) * scale;
    if (size > 2) values.z = (second ? x.at[first + 2].y : x.at[first + 2].x) * scale;
    if (size > 2) values.w = (second ? x.at[first + 3].y : x.at[first + 3].x) * scale;
    if (!live) values = float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (accumulate) values = load_some(source(row), c, hd, size) + values;
    store_some(row, c, hd, size, values);
  }
}

// a . b of a row block of a tile with 8 keys: dot_rows with the tile on the left.
template <int N>
METAL_FUNC Block dot_keys(threadgroup const float* row, thread const Blocks<N>& b, Lane at) {
  Block sum = Block(0.0f, 0.0f);
#pragma clang loop unroll(full)
  for (Int32 first = 0; first < N; first += 4) {
    Blocks<4> a;
    load_across<N>(row, first, at.column, a);
#pragma clang loop unroll(full)
    for (Int32 n = 0; n < group_size<N>(first); ++n) {
      sum = multiply_add(a.at[n], b.at[first + n], sum);
    }
  }
  return sum;
}

// sums + transpose(x) w of 8 rows of a tile from query i on, for what of x is not finite, where the
// row is live and sees the lane's keys. `bits`: which of the lane's two pairs are seen, where pairs
// are asked for. Rare and slow, as add_hidden_rows.
template <int N>
METAL_FUNC void add_hidden_columns(threadgroup const float* x, Int32 stride, Block w, uint bits,
                                   Range left, Range right, threadgroup const RowStatistics* rows,
                                   Int32 i, Lane at, thread Blocks<N>& sums) {
#pragma clang loop unroll(disable)
  for (Int32 j = 0; j < kBlockSize; ++j) {
    ushort lane = lane_holding(j, at.column);
    Block weight = Block(metal::simd_shuffle(w.x, lane), metal::simd_shuffle(w.y, lane));
    threadgroup const float* row = x + j * stride;
    bool live = is_live(rows[j]);
    bool first_seen = live && contains(left, i + j);
    bool second_seen = live && contains(right, i + j);
    if (asks_pairs()) {
      uint pairs = metal::simd_shuffle(bits, lane);
      first_seen = live && (pairs & 1u) != 0;
      second_seen = live && (pairs & 2u) != 0;
    }
#pragma clang loop unroll(full)
    for (Int32 first = 0; first < N; first += 4) {
      Blocks<4> values;
      load_down<N>(row, row, first, at.row, values);
#pragma clang loop unroll(full)
      for (Int32 n = 0; n < group_size<N>(first); ++n) {
        float value = values.at[n].x;
        Block sum = sums.at[first + n];
        sums.at[first + n] = Block(with_hidden(sum.x, weight.x, value, first_seen),
                                   with_hidden(sum.y, weight.y, value, second_seen));
      }
    }
  }
}

// sums += transpose(8 rows of a tile, the first at x) w.
template <int N>
METAL_FUNC void add_rows(threadgroup const float* x, Int32 stride, Block w, uint bits,
                         threadgroup const RowStatistics* rows, Int32 i, bool finite, Lane at,
                         thread OwnedKeys<N>& own) {
  threadgroup const float* left = x + at.column * stride;
  Blocks<N> a;
#pragma clang loop unroll(full)
  for (Int32 first = 0; first < N; first += 4) {
    Blocks<4> group;
    load_down<N>(left, left + stride, first, at.row, group);
#pragma clang loop unroll(full)
    for (Int32 n = 0; n < group_size<N>(first); ++n) a.at[first + n] = group.at[n];
  }
  if (!finite) keep_finite(a);
#pragma clang loop unroll(full)
  for (Int32 n = 0; n < N; ++n) {
    own.sums.at[n] += multiply_add(a.at[n], w, Block(0.0f, 0.0f));
  }
  if (!finite) {
    add_hidden_columns(x, stride, w, bits, own.left_seen, own.right_seen, rows, i, at, own.sums);
  }
}

// Whether no row of a tile is dead: the same answer in all simdgroups.
template <int kRows>
METAL_FUNC bool all_are_live(threadgroup const RowStatistics* rows, uint lane) {
  return metal::simd_all(is_live(rows[lane % uint(kRows)]));
}

}  // namespace forge

using namespace forge;

// dv = sum of p dout and dk = scale * sum of ds q, for a tile of keys of a kv head.
template <int kHd, GpuFamily kGpu = kAnyGpu, int kThreads = DkvShape<kHd, kGpu>::kThreads>
[[kernel, max_total_threads_per_threadgroup(kThreads)]] void attention_fused_bwd_dkv(
    device const uchar* q [[buffer(kBufferQ)]], device const uchar* k [[buffer(kBufferK)]],
    device const uchar* v [[buffer(kBufferV)]],
    device const float* row_max [[buffer(kBufferRowMax)]],
    device const float* row_sum [[buffer(kBufferRowSum)]],
    device const uchar* dout [[buffer(kBufferDout)]],
    device const float* d_row [[buffer(kBufferDRow)]], device uchar* dk [[buffer(kBufferDk)]],
    device uchar* dv [[buffer(kBufferDv)]],
    device const uchar* bias [[buffer(kBufferBias), function_constant(has_bias)]],
    device const uchar* mask [[buffer(kBufferMask), function_constant(has_mask)]],
    device const uchar* sinks [[buffer(kBufferSinks), function_constant(has_sinks)]],
    device const float* o [[buffer(kBufferO), function_constant(has_sinks)]],
    device const AttnRange* ranges [[buffer(kBufferRanges)]],
    constant AttnParams& params [[buffer(kBufferParams)]],
    constant AttnGrid& grid [[buffer(kBufferGrid)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  typedef BackwardShape<kHd, kGpu> Shape;
  typedef DkvShape<kHd, kGpu> Sizes;
  threadgroup float4 tiles[2 * Sizes::kTileFloats / 4];
  threadgroup RowStatistics statistics[Sizes::kRows];
  threadgroup float2 pairs[Sizes::kExchangePairs];
  threadgroup Int32 votes[Sizes::kSimdgroups];
  threadgroup float* q_tile = reinterpret_cast<threadgroup float*>(tiles);
  threadgroup float* exchange = reinterpret_cast<threadgroup float*>(pairs);
  Lane at = lane_place(lane);
  uint thread_ = simdgroup * kSimdgroupWidth + lane;
  Int32 b = grid.batch + Int32(group.z);
  Int32 kv_head = grid.head + Int32(group.y);
  Int32 first_key = (grid.tile + Int32(group.x)) * Sizes::kKeys;
  Int32 Tq = Int32(params.Tq);
  Int32 Tk = Int32(params.Tk);
  Int32 key_block = Int32(simdgroup % Sizes::kKeyBlocks);
  Int32 part = Int32(simdgroup / Sizes::kKeyBlocks % Shape::kParts);
  Int32 role = Int32(simdgroup / (Sizes::kKeyBlocks * Shape::kParts));
  Int32 channel = part * Shape::kOwnChannels;
  Int32 block_key = first_key + key_block * kBlockSize;
  Int32 key = block_key + at.column;  // the lane's first
  Band band = band_of_sequence(params, ranges, b);
  ScoreOptions options = score_options(params, grid);
  Range seen = queries_of_keys(band, Tq, block_key, kBlockSize);
  Range queries = queries_of_keys(band, Tq, first_key, Sizes::kKeys);
  Range keys_here = {first_key, smaller(first_key + Sizes::kKeys, Tk)};
  PairArrays arrays = {source(q, is_half_bias), q};
  if (has_bias) arrays.bias = source(bias, is_half_bias);
  if (has_mask) arrays.mask = mask;
  Int32 channels = role == kSumsDv ? params.hd : params.hv;  // of own.right
  OwnedKeys<Shape::kOwnBlocks> own;
  HeadRows keys = head_rows(source(role == kSumsDv ? k : v, is_half_kv),
                            role == kSumsDv ? params.k : params.v, b, kv_head);
  load_columns(after(keys.row0, smaller(key, Tk - 1) * keys.stride),
               after(keys.row0, smaller(key + 1, Tk - 1) * keys.stride), channel, channels, at,
               own.right);
  set_zero(own.sums);
  own.left_seen = visible_queries(band, key, Tq);
  own.right_seen = visible_queries(band, key + 1, Tq);
  if (has_runs) {
    queries = queries_with_runs(params, ranges, b, keys_here, lane);
    seen = queries;
  }

  HeadRows q_rows = head_rows(source(q, is_half_q), params.q, b, kv_head * grid.rep);
  HeadRows dout_rows = head_rows(source(dout, is_half_q), params.dout, b, kv_head * grid.rep);
  Source q_head = after(q_rows.row0, queries.begin * q_rows.stride);
  Source dout_head = after(dout_rows.row0, queries.begin * dout_rows.stride);
  Int64 stat = stat_index(params, b, kv_head * grid.rep, 0);
  // The tile that meets own.right, and the other one; where this simdgroup leaves its products, and
  // where everybody finds all of them.
  threadgroup const float* score_rows = q_tile + role * Sizes::kTileFloats + channel;
  threadgroup const float* sum_rows = q_tile + (1 - role) * Sizes::kTileFloats + channel;
  constexpr Int32 kRoleSlots = Shape::kParts * Sizes::kSlots;
  Int32 slot = key_block * Sizes::kRowBlocks;
  Int32 own_slot = role * kRoleSlots + part * Sizes::kSlots + slot;
  bool fresh = true;
  for (Int32 n = 0; n < grid.rep; ++n) {
    Source q_from = q_head;
    Source dout_from = dout_head;
    for (Int32 first = queries.begin; first < queries.end; first += Sizes::kRows) {
      Int32 asked = first + Int32(lane) % Int32(Sizes::kRows);
      bool hidden = has_runs && !query_sees(params, ranges, b, asked, keys_here);
      hidden = metal::simd_all(hidden);
      if (hidden) {
        q_from = after(q_from, Sizes::kRows * q_rows.stride);
        dout_from = after(dout_from, Sizes::kRows * dout_rows.stride);
        continue;
      }
      if (!fresh) metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      fresh = false;
      TileRows present = {0, queries.end - first};
      bool finite = stage_rows<kHd, Sizes::kRows, Sizes::kThreads, kAbsentRowsAreZeros>(
          q_from, q_rows.stride, present, params.hd, thread_, q_tile);
      bool dout_finite = stage_rows<kHd, Sizes::kRows, Sizes::kThreads, kAbsentRowsAreZeros>(
          dout_from, dout_rows.stride, present, params.hv, thread_, q_tile + Sizes::kTileFloats);
      leave_vote(votes, finite && dout_finite, simdgroup, lane);
      q_from = after(q_from, Sizes::kRows * q_rows.stride);
      dout_from = after(dout_from, Sizes::kRows * dout_rows.stride);
      if (thread_ < uint(Sizes::kRows)) {
        Int64 i = stat + smaller(first + Int32(thread_), Tq - 1);
        RowStatistics row = row_statistics(row_max[i], row_sum[i], d_row[i]);
        if (has_sinks) {
          SinkRows sink_rows = {source(sinks, is_half_sinks), o};
          bool alone =
              is_sink_alone(params, sink_rows, b, kv_head * grid.rep + n,
                            smaller(first + Int32(thread_), Tq - 1), row_max[i], row_sum[i]);
          if (alone) row.inverse_l = INFINITY;
        }
        statistics[thread_] = row;
      }
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

      BlockSpan span = block_span(seen, own.left_seen, own.right_seen, first, Sizes::kRows);
      if (has_runs) span.whole = false;
#pragma clang loop unroll(disable)
      for (Int32 r = span.from; r < span.to; ++r) {
        Block product =
            dot_keys(score_rows + (r * kBlockSize + at.row) * Shape::kStride, own.right, at);
        leave_block(exchange, own_slot + r, lane, product);
      }
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);

      // Rows that are dead take the slow way, as if they held what is not finite: both are rare.
      bool all_live = all_are_live<Sizes::kRows>(statistics, lane);
      finite = all_live && (span.whole || unanimous<Sizes::kSimdgroups>(votes));
#pragma clang loop unroll(disable)
      for (Int32 r = span.from; r < span.to; ++r) {
        Products products;
        products.s = sum_of_parts<Shape::kParts>(exchange, slot + r, Sizes::kSlots, lane);
        products.dp = Block(0.0f, 0.0f);
        if (role == kSumsDk) {
          products.dp =
              sum_of_parts<Shape::kParts>(exchange, kRoleSlots + slot + r, Sizes::kSlots, lane);
        }
        threadgroup const RowStatistics* block_rows = statistics + r * kBlockSize;
        RowStatistics row = block_rows[at.row];
        Int32 i = first + r * kBlockSize;
        PairBlock block = {0u, Block(0.0f, 0.0f)};
        if (asks_pairs() && i + at.row < Tq) {
          Range row_keys =
              visible_keys(band_of(params, range_of(params, ranges, b, i + at.row)), i + at.row);
          PairRow pairs = pair_row(params, arrays, b, kv_head * grid.rep + n, i + at.row);
          block = pair_block(pairs, row_keys, key);
        }
        Gradients of = gradients_of(options, products, block.bias, row);
        Block w = role == kSumsDk ? of.ds : of.p;
        if (!all_live && !is_live(row)) w = Block(0.0f, 0.0f);
        if (asks_pairs()) {
          w = where_shown(block.bits, w, 0.0f);
        } else if (!span.whole) {
          w = Block(contains(own.left_seen, i + at.row) ? w.x : 0.0f,
                    contains(own.right_seen, i + at.row) ? w.y : 0.0f);
        }
        add_rows(sum_rows + r * kBlockSize * Shape::kStride, Shape::kStride, w, block.bits,
                 block_rows, i, finite, at, own);
      }
    }
    q_head = after(q_head, params.q.head);
    dout_head = after(dout_head, params.dout.head);
    stat += Tq;
  }

  Target out = role == kSumsDv ? target(dv, is_half_dv) : target(dk, is_half_dk);
  AttnStrides strides = role == kSumsDv ? params.dv : params.dk;
  float scale = role == kSumsDv ? 1.0f : params.scale;
  for (Int32 second = 0; second < 2; ++second) {
    Int32 j = key + second;
    if (j >= Tk) continue;
    bool live = has_runs || (j >= band.key_begin && j < band.key_end);
    store_column(own.sums, second != 0, scale, live, after(out, offset_of(strides, b, j, kv_head)),
                 channel, role == kSumsDv ? params.hv : params.hd, at);
  }
}
