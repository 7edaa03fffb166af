// Few queries against many keys (Tq <= kMaxDecodeQueries): the forward with each run of keys given
// to a simdgroup of its own, which reads them straight into registers, and the kernel that adds the
// runs up in the forward's order.
#pragma once

#include "fused_forward.h"

namespace forge {

template <int kHd, GpuFamily kGpu>
struct DecodeShape {
  enum Sizes {
    kKeys = fused_tiling(kGpu, kHd).forward_keys,
    kKeyBlocks = kKeys / kBlockSize,
    kRuns = fused_tiling(kGpu, kHd).parts,
    kRunBlocks = kHd / kRuns / kBlockSize,
    kRunChannels = kRunBlocks * kBlockSize,
    kBatch = kKeyBlocks < 2 ? 1 : 2,  // blocks of keys whose loads are sent together
  };
};

// Keys of a sequence as a simdgroup reads them: those that none of its rows sees give way to one
// that some row sees, so that nothing else is read.
struct KeysInPlace {
  HeadRows rows;
  Range seen;
  Int32 channels;
};

METAL_FUNC Source key_row(KeysInPlace keys, Int32 key) {
  Int32 read = smaller(larger(key, keys.seen.begin), keys.seen.end - 1);
  return after(keys.rows.row0, read * keys.rows.stride);
}

// dots += q . k of a tile of keys over one run of channels, kBatch blocks of keys at a time. The
// runs come in the order in which multiply_keys adds them.
template <int N, int kBatch, int kKeyBlocks>
METAL_FUNC void add_dots_in_place(thread const Blocks<N>& q, KeysInPlace keys, Int32 first,
                                  Int32 channel, Lane at, thread Blocks<kKeyBlocks>& dots) {
#pragma clang loop unroll(full)
  for (Int32 b = 0; b < kKeyBlocks; b += kBatch) {
    Blocks<N> k[kBatch];
#pragma clang loop unroll(full)
    for (Int32 i = 0; i < kBatch; ++i) {
      Int32 key = first + (b + i) * kBlockSize + at.column;
      load_columns(key_row(keys, key), key_row(keys, key + 1), channel, keys.channels, at, k[i]);
    }
#pragma clang loop unroll(full)
    for (Int32 i = 0; i < kBatch; ++i) {
      Block sum = Block(0.0f, 0.0f);
#pragma clang loop unroll(full)
      for (Int32 n = 0; n < N; ++n) sum = multiply_add(q.at[n], k[i].at[n], sum);
      dots.at[b + i] = channel == 0 ? sum : dots.at[b + i] + sum;
    }
  }
}

// add_hidden_rows with the values in device memory.
template <int N>
METAL_FUNC void add_hidden_in_place(Block w, Sight seen, KeysInPlace keys, Int32 key, Int32 channel,
                                    Lane at, thread Blocks<N>& sums) {
#pragma clang loop unroll(disable)
  for (Int32 j = 0; j < kBlockSize; ++j) {
    ushort lane = lane_holding(at.row, j);
    float even = metal::simd_shuffle(w.x, lane);
    float odd = metal::simd_shuffle(w.y, lane);
    Blocks<N> values;
    load_row(key_row(keys, key + j), channel, keys.channels, at, values);
    float weight = j % 2 == 0 ? even : odd;
    bool shown = sees(seen, key, j, at);
#pragma clang loop unroll(full)
    for (Int32 n = 0; n < N; ++n) {
      sums.at[n].x = with_hidden(sums.at[n].x, weight, values.at[n].x, shown);
      sums.at[n].y = with_hidden(sums.at[n].y, weight, values.at[n].y, shown);
    }
  }
}

// o = o * alpha + p times the values of a tile, as add_values has it. `whole`: all rows see it all.
template <int N, int kBatch, int kKeyBlocks>
METAL_FUNC void add_values_in_place(thread const Blocks<kKeyBlocks>& p, float alpha, Sight seen,
                                    KeysInPlace values, Int32 key, Int32 channel, bool whole,
                                    Lane at, thread Blocks<N>& o) {
  bool finite = true;
  Blocks<N> sums;
  set_zero(sums);
#pragma clang loop unroll(full)
  for (Int32 b = 0; b < kKeyBlocks; b += kBatch) {
    Blocks<N> v[kBatch];
#pragma clang loop unroll(full)
    for (Int32 i = 0; i < kBatch; ++i) {
      load_row(key_row(values, key + (b + i) * kBlockSize + at.row), channel, values.channels, at,
               v[i]);
    }
#pragma clang loop unroll(full)
    for (Int32 i = 0; i < kBatch; ++i) {
      if (!whole) {
        finite = finite && all_finite(v[i]);
        keep_finite(v[i]);
      }
#pragma clang loop unroll(full)
      for (Int32 n = 0; n < N; ++n) {
        sums.at[n] = multiply_add(p.at[b + i], v[i].at[n], sums.at[n]);
      }
    }
  }
#pragma clang loop unroll(full)
  for (Int32 n = 0; n < N; ++n) {
    o.at[n] = metal::fma(o.at[n], Block(alpha, alpha), sums.at[n]);
  }
  if (metal::simd_all(finite)) return;
#pragma clang loop unroll(disable)
  for (Int32 b = 0; b < kKeyBlocks; ++b) {
    add_hidden_in_place(block_of(p, b), sight_of(seen.keys, seen.bits >> uint(2 * b)), values,
                        key + b * kBlockSize, channel, at, o);
  }
}

}  // namespace forge

using namespace forge;

// A simdgroup has 8 rows of a kv head's group against one run of keys; x counts eight of them, rows
// first: those that share keys are neighbours. Unfinished rows go to `partial`.
template <int kHd, GpuFamily kGpu = kAnyGpu, int kThreads = kDecodeSimdgroups * kSimdgroupWidth>
[[kernel, max_total_threads_per_threadgroup(kThreads)]] void attention_decode(
    device const uchar* q [[buffer(kBufferQ)]], device const uchar* k [[buffer(kBufferK)]],
    device const uchar* v [[buffer(kBufferV)]], device float* partial [[buffer(kBufferPartial)]],
    device const uchar* bias [[buffer(kBufferBias), function_constant(has_bias)]],
    device const uchar* mask [[buffer(kBufferMask), function_constant(has_mask)]],
    device const AttnRange* ranges [[buffer(kBufferRanges)]],
    constant AttnParams& params [[buffer(kBufferParams)]],
    constant AttnGrid& grid [[buffer(kBufferGrid)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  typedef DecodeShape<kHd, kGpu> Shape;
  RowGroup rows = row_group(params, grid, ranges, group);
  Lane at = lane_place(lane);
  Int32 unit = (grid.tile + Int32(group.x)) * kDecodeSimdgroups + Int32(simdgroup);
  Int32 row_blocks = (rows.end + kBlockSize - 1) / kBlockSize;
  Int32 split = unit / row_blocks;
  Int32 first_row = (unit - split * row_blocks) * kBlockSize;
  Range keys = keys_of_rows(params, ranges, rows, first_row, kBlockSize, lane);
  keys.begin = larger(keys.begin, split * kSplitKeys);
  keys.end = smaller(keys.end, (split + 1) * kSplitKeys);
  if (is_empty(keys)) return;
  Int32 r = first_row + at.row;
  bool exists = r < rows.end;
  RowPlace place = row_place(rows, exists ? r : rows.end - 1);
  ScoreOptions options = score_options(params, grid);
  Range row_seen = keys_of_query(params, ranges, rows, place.query);
  PairArrays arrays = {source(q, is_half_bias), q};
  if (has_bias) arrays.bias = source(bias, is_half_bias);
  if (has_mask) arrays.mask = mask;
  PairRow pairs = pair_row(params, arrays, rows.b, place.head, place.query);
  KeysInPlace k_rows = {head_rows(source(k, is_half_kv), params.k, rows.b, rows.kv_head), keys,
                        params.hd};
  KeysInPlace v_rows = {head_rows(source(v, is_half_kv), params.v, rows.b, rows.kv_head), keys,
                        params.hv};
  Source q_row = after(source(q, is_half_q), offset_of(params.q, rows.b, place.query, place.head));
  Blocks<Shape::kRunBlocks> o[Shape::kRuns];
#pragma clang loop unroll(full)
  for (Int32 run = 0; run < Shape::kRuns; ++run) set_zero(o[run]);
  RowSums sums = no_sums();
  for (Int32 first = keys.begin / Shape::kKeys * Shape::kKeys; first < keys.end;
       first += Shape::kKeys) {
    BlockSpan span;
    span.from = 0;
    span.to = Shape::kKeyBlocks;
    span.whole = is_seen_whole(row_seen, row_seen, first, first + Shape::kKeys);
    if (hides_pairs()) span.whole = false;
    Blocks<Shape::kKeyBlocks> p;
#pragma clang loop unroll(full)
    for (Int32 run = 0; run < Shape::kRuns; ++run) {
      Blocks<Shape::kRunBlocks> q_blocks;
      load_row(q_row, run * Shape::kRunChannels, params.hd, at, q_blocks);
      add_dots_in_place<Shape::kRunBlocks, Shape::kBatch>(q_blocks, k_rows, first,
                                                          run * Shape::kRunChannels, at, p);
    }
    uint bits;
    float alpha = softmax_step(options, span, row_seen, pairs, first + at.column, p, sums, bits);
#pragma clang loop unroll(full)
    for (Int32 run = 0; run < Shape::kRuns; ++run) {
      add_values_in_place<Shape::kRunBlocks, Shape::kBatch>(
          p, alpha, sight_of(row_seen, bits), v_rows, first, run * Shape::kRunChannels, span.whole,
          at, o[run]);
    }
  }

  if (!exists) return;
  Int64 stat = stat_index(params, rows.b, place.head, place.query);
  device float* to =
      partial + (stat * decode_splits(params.Tk) + split) * decode_partial_floats(params.hv);
#pragma clang loop unroll(full)
  for (Int32 run = 0; run < Shape::kRuns; ++run) {
    store_row(target(to), run * Shape::kRunChannels, params.hv, at, o[run]);
  }
  if (at.column == 0) {
    to[params.hv] = sums.m;
    to[params.hv + 1] = sums.l;
  }
}

// One row (b, h, i) a simdgroup: the runs of keys that it sees, in order, as the forward's end_run
// adds them.
kernel void attention_decode_combine(
    device const float* partial [[buffer(kBufferPartial)]], device float* o [[buffer(kBufferO)]],
    device uchar* rounded_o [[buffer(kBufferRounded), function_constant(has_rounded)]],
    device float* row_max [[buffer(kBufferRowMax)]],
    device float* row_sum [[buffer(kBufferRowSum)]],
    device const uchar* sinks [[buffer(kBufferSinks), function_constant(has_sinks)]],
    device const AttnRange* ranges [[buffer(kBufferRanges)]],
    constant AttnParams& params [[buffer(kBufferParams)]],
    constant AttnGrid& grid [[buffer(kBufferGrid)]], uint3 group [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]]) {
  constexpr Int32 kAhead = 4;  // runs whose loads are sent together
  Int32 i = grid.tile + Int32(group.x);
  Int32 h = grid.head + Int32(group.y);
  Int32 b = grid.batch + Int32(group.z);
  Range seen = visible_keys(band_of(params, range_of(params, ranges, b, i)), i);
  float sink = has_sinks ? sink_of(params, source(sinks, is_half_sinks), b, h, i) : -INFINITY;
  bool sees_keys = !is_empty(seen);
  Int32 begin = seen.begin / kSplitKeys;
  Int32 end = sees_keys ? (seen.end + kSplitKeys - 1) / kSplitKeys : begin;
  Int64 step = decode_partial_floats(params.hv);
  Int64 row = stat_index(params, b, h, i);
  device const float* parts = partial + row * decode_splits(params.Tk) * step;
  Target o_row = after(target(o), offset_of(params.o, b, i, h));
  RowSums total = no_sums();
  for (Int32 c = Int32(lane) * 4; c < params.hv; c += 4 * kSimdgroupWidth) {
    total = no_sums();
    float4 sum = float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (Int32 split = begin; split < end; split += kAhead) {
      float4 values[kAhead];
      RowSums runs[kAhead];
#pragma clang loop unroll(full)
      for (Int32 n = 0; n < kAhead; ++n) {
        device const float* part = parts + smaller(split + n, end - 1) * step;
        values[n] = load_four(source(part), c, params.hv);
        runs[n].m = part[params.hv];
        runs[n].l = part[params.hv + 1];
      }
#pragma clang loop unroll(full)
      for (Int32 n = 0; n < kAhead; ++n) {
        if (split + n >= end) break;
        Shares shares = {0.0f, 1.0f};
        if (split + n == begin) {
          total = runs[n];
        } else {
          shares = merge(total, runs[n]);
        }
        Block low = merged(shares, Block(sum.x, sum.y), Block(values[n].x, values[n].y));
        Block high = merged(shares, Block(sum.z, sum.w), Block(values[n].z, values[n].w));
        sum = float4(low.x, low.y, high.x, high.y);
      }
    }
    total = finished_sums(sees_keys, total);
    bool live = total.l != 0.0f;
    float share = has_sinks ? add_sink(sink, total) : 1.0f;
    float factor = share / total.l;
    float4 result = live ? float4(sum.x * factor, sum.y * factor, sum.z * factor, sum.w * factor)
                         : float4(0.0f, 0.0f, 0.0f, 0.0f);
    store_four(o_row, c, params.hv, result);
    if (has_rounded) {
      store_four(after(target(rounded_o, true), offset_of(params.rounded, b, i, h)), c, params.hv,
                 result);
    }
  }
  if (lane == 0) {
    row_max[row] = total.m;
    row_sum[row] = total.l;
  }
}
