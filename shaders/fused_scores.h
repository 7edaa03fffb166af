// The gradients of bias and sinks: dbias recomputes the scores block by block, dsinks takes a pass
// over the rows.
#pragma once

#include "decode.h"
#include "fused_backward.h"

namespace forge {

// The part of an axis of `extent` that is summed into element `at` of dbias or dsinks: itself where
// they have the axis, else all of it.
METAL_FUNC Range summed(bool has_axis, Int32 at, Int32 extent) {
  Range range = {at, at + 1};
  if (!has_axis) {
    range.begin = 0;
    range.end = extent;
  }
  return range;
}

METAL_FUNC Int32 blocks_of(Int64 length) { return Int32((length + kBlockSize - 1) / kBlockSize); }

// A row's query and dout, and the keys and values that it meets, in device memory.
struct ScoreRows {
  Source q;
  Source dout;
  KeysInPlace k;
  KeysInPlace v;
};

// s and dp of a block, with the sums over the channels in the order of the other kernels.
template <int kHd, GpuFamily kGpu>
METAL_FUNC Products products_in_place(ScoreRows rows, Int32 hd, Int32 hv, Int32 key, Lane at) {
  typedef DecodeShape<kHd, kGpu> Shape;
  Blocks<1> s;
  Blocks<1> dp;
#pragma clang loop unroll(full)
  for (Int32 run = 0; run < Shape::kRuns; ++run) {
    Int32 channel = run * Shape::kRunChannels;
    Blocks<Shape::kRunBlocks> left;
    load_row(rows.q, channel, hd, at, left);
    add_dots_in_place<Shape::kRunBlocks, 1>(left, rows.k, key, channel, at, s);
    load_row(rows.dout, channel, hv, at, left);
    add_dots_in_place<Shape::kRunBlocks, 1>(left, rows.v, key, channel, at, dp);
  }
  Products products = {s.at[0], dp.at[0]};
  return products;
}

// The sum over the rows of a block, in all lanes of a column.
METAL_FUNC float column_sum(float x) {
  x += metal::simd_shuffle_xor(x, 2);
  x += metal::simd_shuffle_xor(x, 4);
  return x + metal::simd_shuffle_xor(x, 16);
}

}  // namespace forge

using namespace forge;

// dbias = sum of p (dp - d) over the axes that it lacks. A simdgroup has 8 x 8 elements of it (8 or
// 1 where an axis is summed), and goes through what is summed by ascending b, h, i and j; x counts
// blocks, keys first.
template <int kHd, GpuFamily kGpu = kAnyGpu, int kThreads = kDbiasSimdgroups * kSimdgroupWidth>
[[kernel, max_total_threads_per_threadgroup(kThreads)]] void attention_fused_bwd_dbias(
    device const uchar* q [[buffer(kBufferQ)]], device const uchar* k [[buffer(kBufferK)]],
    device const uchar* v [[buffer(kBufferV)]],
    device const float* row_max [[buffer(kBufferRowMax)]],
    device const float* row_sum [[buffer(kBufferRowSum)]],
    device const uchar* dout [[buffer(kBufferDout)]],
    device const float* d_row [[buffer(kBufferDRow)]],
    device const uchar* bias [[buffer(kBufferBias)]],
    device const uchar* mask [[buffer(kBufferMask), function_constant(has_mask)]],
    device const uchar* sinks [[buffer(kBufferSinks), function_constant(has_sinks)]],
    device const float* o [[buffer(kBufferO), function_constant(has_sinks)]],
    device uchar* dbias [[buffer(kBufferDbias)]],
    device const AttnRange* ranges [[buffer(kBufferRanges)]],
    constant AttnParams& params [[buffer(kBufferParams)]],
    constant AttnGrid& grid [[buffer(kBufferGrid)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  Lane at = lane_place(lane);
  Int32 Tq = Int32(params.Tq);
  Int32 Tk = Int32(params.Tk);
  bool has_rows = (params.dbias_axes & kRowAxis) != 0;
  bool has_keys = (params.dbias_axes & kKeyAxis) != 0;
  Int32 key_blocks = has_keys ? blocks_of(params.Tk) : 1;
  Int32 unit = (grid.tile + Int32(group.x)) * kDbiasSimdgroups + Int32(simdgroup);
  Int32 row_block = unit / key_blocks;
  Int32 key_block = unit - row_block * key_blocks;
  if (row_block >= (has_rows ? blocks_of(params.Tq) : 1)) return;
  Int32 own_b = grid.batch + Int32(group.z);
  Int32 own_h = grid.head + Int32(group.y);
  Range batches = summed((params.dbias_axes & kBatchAxis) != 0, own_b, Int32(params.B));
  Range heads = summed((params.dbias_axes & kHeadAxis) != 0, own_h, params.H);
  Range row_blocks = summed(has_rows, row_block, blocks_of(params.Tq));
  Range blocks = summed(has_keys, key_block, blocks_of(params.Tk));
  ScoreOptions options = score_options(params, grid);
  PairArrays arrays = {source(bias, is_half_bias), q};
  if (has_mask) arrays.mask = mask;
  Range all_keys = {0, Tk};
  Block sum = Block(0.0f, 0.0f);
  for (Int32 b = batches.begin; b < batches.end; ++b) {
    for (Int32 h = heads.begin; h < heads.end; ++h) {
      Int32 kv_head = divided_by_rep(h, grid.rep_factor, grid.rep_shift);
      ScoreRows rows;
      rows.k.rows = head_rows(source(k, is_half_kv), params.k, b, kv_head);
      rows.k.seen = all_keys;
      rows.k.channels = params.hd;
      rows.v.rows = head_rows(source(v, is_half_kv), params.v, b, kv_head);
      rows.v.seen = all_keys;
      rows.v.channels = params.hv;
      for (Int32 block = row_blocks.begin; block < row_blocks.end; ++block) {
        Int32 i = smaller(block * kBlockSize + at.row, Tq - 1);
        Range seen = visible_keys(band_of(params, range_of(params, ranges, b, i)), i);
        if (block * kBlockSize + at.row >= Tq) seen.end = seen.begin;
        Int64 stat = stat_index(params, b, h, i);
        RowStatistics row = row_statistics(row_max[stat], row_sum[stat], d_row[stat]);
        bool live = is_live(row);
        if (has_sinks) {
          SinkRows sink_rows = {source(sinks, is_half_sinks), o};
          bool alone = is_sink_alone(params, sink_rows, b, h, i, row_max[stat], row_sum[stat]);
          live = live && !alone;
        }
        if (!live) seen.end = seen.begin;
        PairRow pairs = pair_row(params, arrays, b, h, i);
        rows.q = after(source(q, is_half_q), offset_of(params.q, b, i, h));
        rows.dout = after(source(dout, is_half_q), offset_of(params.dout, b, i, h));
        Range any = hull_of_lanes(seen);
        for (Int32 n = blocks.begin; n < blocks.end; ++n) {
          Int32 first = n * kBlockSize;
          if (first >= any.end || first + kBlockSize <= any.begin) continue;
          PairBlock shown = pair_block(pairs, seen, first + at.column);
          Products products = products_in_place<kHd, kGpu>(rows, params.hd, params.hv, first, at);
          Block s = scores_of(products.s, options).s + shown.bias;
          Block p = probabilities(s, row.m, row.inverse_l);
          Block term = Block(p.x * (products.dp.x - row.d), p.y * (products.dp.y - row.d));
          sum += where_shown(shown.bits, term, 0.0f);
        }
      }
    }
  }
  if (!has_rows) sum = Block(column_sum(sum.x), column_sum(sum.y));
  if (!has_keys) sum = Block(forge::row_sum(sum), 0.0f);
  Int32 i = has_rows ? row_block * kBlockSize + at.row : 0;
  Int32 j = has_keys ? key_block * kBlockSize + at.column : 0;
  bool writes = (has_rows ? i < Tq : at.row == 0) && (has_keys || at.column == 0);
  Target to = after(target(dbias, is_half_dbias), offset_of(params.dbias, own_b, own_h, i));
#pragma clang loop unroll(full)
  for (Int32 n = 0; n < 2; ++n) {
    if (!writes || (n > 0 && !has_keys) || (has_keys && j + n >= Tk)) continue;
    Target element = after(to, (j + n) * params.dbias.key);
    float x = n == 0 ? sum.x : sum.y;
    write_one(element, accumulate ? read_one(source(element)) + x : x);
  }
}

// dsinks = -sum of p_sink d over the axes that it lacks: a simdgroup an element. x counts its rows,
// y its heads, z its sequences.
kernel void attention_fused_bwd_dsinks(device const float* row_max [[buffer(kBufferRowMax)]],
                                       device const float* row_sum [[buffer(kBufferRowSum)]],
                                       device const float* d_row [[buffer(kBufferDRow)]],
                                       device const uchar* sinks [[buffer(kBufferSinks)]],
                                       device uchar* dsinks [[buffer(kBufferDsinks)]],
                                       constant AttnParams& params [[buffer(kBufferParams)]],
                                       constant AttnGrid& grid [[buffer(kBufferGrid)]],
                                       uint3 group [[threadgroup_position_in_grid]],
                                       uint lane [[thread_index_in_simdgroup]]) {
  Int32 own_i = grid.tile + Int32(group.x);
  Int32 own_h = grid.head + Int32(group.y);
  Int32 own_b = grid.batch + Int32(group.z);
  Range batches = summed((params.dsinks_axes & kBatchAxis) != 0, own_b, Int32(params.B));
  Range heads = summed((params.dsinks_axes & kHeadAxis) != 0, own_h, params.H);
  Range queries = summed((params.dsinks_axes & kRowAxis) != 0, own_i, Int32(params.Tq));
  float sum = 0.0f;
  for (Int32 b = batches.begin; b < batches.end; ++b) {
    for (Int32 h = heads.begin; h < heads.end; ++h) {
      for (Int32 i = queries.begin + Int32(lane); i < queries.end; i += kSimdgroupWidth) {
        float sink = sink_of(params, source(sinks, is_half_sinks), b, h, i);
        if (sink == -INFINITY) continue;
        Int64 stat = stat_index(params, b, h, i);
        float t = sink - row_max[stat];
        float p = exp_of(t > 0.0f ? 0.0f : t) / row_sum[stat];
        sum = metal::fma(-p, d_row[stat], sum);
      }
    }
  }
  for (ushort other = 16; other > 0; other /= 2) sum += metal::simd_shuffle_xor(sum, other);
  if (lane != 0) return;
  Target to = after(target(dsinks, is_half_dsinks), offset_of(params.dsinks, own_b, own_h, own_i));
  write_one(to, accumulate ? read_one(source(to)) + sum : sum);
}
