// The forward of 32 query rows: online softmax over tiles of keys.
#pragma once

#include "fused.h"
#include "online_softmax.h"
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
    kRunChannels = kRunBlocks * kBlockSize,
    kSimdgroups = forward_simdgroups(fused_tiling(kGpu, kHd)),
    kThreads = kSimdgroups * kSimdgroupWidth,
    kRowBlocks = kQueryRows / kBlockSize,
    kStride = tile_stride(kHd),
    kTileQuads = tile_floats(kKeys, kHd) / 4,
    kExchangePairs = exchange_pairs(kParts, kQueryRows, kKeys, 1),
  };
};

// What a simdgroup has of its row block.
template <int N, int kRuns>
struct OwnedQueries {
  Blocks<N> q[kRuns];
  Blocks<N> o[kRuns];  // sum of exp(s - m) v over a run of keys
  RowSums sums;        // of that run
  RowSums total;       // of the runs before it, whose o lies in the array of results
  Range seen;          // by the lane's row
};

// dots = q . k over the channels that this simdgroup has.
template <int N, int kRuns, int kKeyBlocks>
METAL_FUNC void multiply_keys(thread const Blocks<N>* q, threadgroup const float* k, Int32 stride,
                              BlockSpan span, Lane at, thread Blocks<kKeyBlocks>& dots) {
#pragma clang loop unroll(full)
  for (Int32 b = 0; b < kKeyBlocks; ++b) {
    if (!holds(span, b)) continue;
    threadgroup const float* keys = k + b * kBlockSize * stride;
    Block sum = dot_rows(q[0], keys, stride, at);
#pragma clang loop unroll(full)
    for (Int32 run = 1; run < kRuns; ++run) {
      sum += dot_rows(q[run], keys + run * N * kBlockSize, stride, at);
    }
    dots.at[b] = sum;
  }
}

// o = o * alpha + p times the values of a tile, for one run of channels; `values` starts at the
// first. `finite`: all of them, or all rows see them all.
template <int N, int kKeyBlocks>
METAL_FUNC void add_values(thread const Blocks<kKeyBlocks>& p, float alpha, BlockSpan span,
                           Range seen, uint bits, Int32 key, threadgroup const float* values,
                           Int32 stride, bool finite, Lane at, thread Blocks<N>& o) {
  threadgroup const float* row = values + at.row * stride;
#pragma clang loop unroll(full)
  for (Int32 first = 0; first < N; first += 4) {
    Blocks<4> sums;
    set_zero(sums);
#pragma clang loop unroll(full)
    for (Int32 b = 0; b < kKeyBlocks; ++b) {
      if (!holds(span, b)) continue;
      Blocks<4> v;
      load_across<N>(row + b * kBlockSize * stride, first, at.column, v);
      if (!finite) keep_finite(v);
#pragma clang loop unroll(full)
      for (Int32 n = 0; n < group_size<N>(first); ++n) {
        sums.at[n] = multiply_add(p.at[b], v.at[n], sums.at[n]);
      }
    }
#pragma clang loop unroll(full)
    for (Int32 n = 0; n < group_size<N>(first); ++n) {
      o.at[first + n] = metal::fma(o.at[first + n], Block(alpha, alpha), sums.at[n]);
    }
  }
  if (finite) return;
#pragma clang loop unroll(disable)
  for (Int32 b = span.from; b < span.to; ++b) {
    add_hidden_rows(block_of(p, b), sight_of(seen, bits >> uint(2 * b)), key + b * kBlockSize,
                    row + b * kBlockSize * stride, stride, at, o);
  }
}

// Where a row's results go, and the first of the simdgroup's channels.
struct ResultRow {
  Target o;        // float, as the sums before the last run are
  Target rounded;  // where has_rounded says so
  Int32 channel;
};

// The end of a run of keys: row.o holds what the runs before it came to, if there were any, and
// takes what all come to now; after the last run, and the sink, it takes the result.
template <int N, int kRuns>
METAL_FUNC void end_run(thread OwnedQueries<N, kRuns>& own, bool first, bool last, float sink,
                        ResultRow row, Int32 hv, Lane at) {
  Shares shares;
  shares.before = 0.0f;
  shares.after = 1.0f;
  if (first) {
    own.total = own.sums;
  } else {
    shares = merge(own.total, own.sums);
  }
  bool live = !is_empty(own.seen);
  if (last) {
    own.total = finished_sums(live, own.total);
    live = own.total.l != 0.0f;
  }
  float share = has_sinks && last ? add_sink(sink, own.total) : 1.0f;
  float factor = last ? share / own.total.l : 1.0f;
#pragma clang loop unroll(full)
  for (Int32 run = 0; run < kRuns; ++run) {
    Int32 c = row.channel + run * N * kBlockSize;
    if (!first) {
      Blocks<N> before;
      load_row(source(row.o), c, hv, at, before);
#pragma clang loop unroll(full)
      for (Int32 n = 0; n < N; ++n) {
        own.o[run].at[n] = merged(shares, before.at[n], own.o[run].at[n]);
      }
    }
#pragma clang loop unroll(full)
    for (Int32 n = 0; n < N; ++n) {
      own.o[run].at[n] = live ? own.o[run].at[n] * factor : Block(0.0f, 0.0f);
    }
    store_row(row.o, c, hv, at, own.o[run]);
    if (has_rounded && last) store_row(row.rounded, c, hv, at, own.o[run]);
    set_zero(own.o[run]);
  }
  own.sums = no_sums();
}

}  // namespace forge

using namespace forge;

// A tile of 32 rows of a kv head's group: two barriers a tile of keys. While one of k and v is used
// the other is staged.
template <int kHd, GpuFamily kGpu = kAnyGpu, int kThreads = ForwardShape<kHd, kGpu>::kThreads>
[[kernel, max_total_threads_per_threadgroup(kThreads)]] void attention_fused_fwd(
    device const uchar* q [[buffer(kBufferQ)]], device const uchar* k [[buffer(kBufferK)]],
    device const uchar* v [[buffer(kBufferV)]], device float* o [[buffer(kBufferO)]],
    device uchar* rounded_o [[buffer(kBufferRounded), function_constant(has_rounded)]],
    device float* row_max [[buffer(kBufferRowMax)]],
    device float* row_sum [[buffer(kBufferRowSum)]],
    device const uchar* bias [[buffer(kBufferBias), function_constant(has_bias)]],
    device const uchar* mask [[buffer(kBufferMask), function_constant(has_mask)]],
    device const uchar* sinks [[buffer(kBufferSinks), function_constant(has_sinks)]],
    device const AttnRange* ranges [[buffer(kBufferRanges)]],
    constant AttnParams& params [[buffer(kBufferParams)]],
    constant AttnGrid& grid [[buffer(kBufferGrid)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  typedef ForwardShape<kHd, kGpu> Shape;
  threadgroup float4 tiles[2 * Shape::kTileQuads];
  threadgroup float2 exchange_pairs[Shape::kExchangePairs];
  threadgroup Int32 votes[Shape::kSimdgroups];
  threadgroup float* k_tile = reinterpret_cast<threadgroup float*>(tiles);
  threadgroup float* v_tile = k_tile + 4 * Shape::kTileQuads;
  threadgroup float* exchange = reinterpret_cast<threadgroup float*>(exchange_pairs);
  RowGroup rows = row_group(params, grid, ranges, group);
  Lane at = lane_place(lane);
  uint thread_ = simdgroup * kSimdgroupWidth + lane;
  Int32 row_block = Int32(simdgroup % Shape::kRowBlocks);
  Int32 channel = Int32(simdgroup / Shape::kRowBlocks) * Shape::kRuns * Shape::kRunChannels;
  Int32 first_row = (grid.tile + Int32(group.x)) * kQueryRows;
  Int32 r = first_row + row_block * kBlockSize + at.row;
  bool exists = r < rows.end;
  RowPlace place = row_place(rows, exists ? r : rows.end - 1);
  ScoreOptions options = score_options(params, grid);
  TileSights sights = sights_of_tile(params, ranges, rows, first_row, row_block, at, lane);
  Range keys = sights.tile;
  Range seen = sights.block;
  PairArrays arrays = {source(q, is_half_bias), q};
  if (has_bias) arrays.bias = source(bias, is_half_bias);
  if (has_mask) arrays.mask = mask;
  PairRow pairs = pair_row(params, arrays, rows.b, place.head, place.query);
  float sink = -INFINITY;
  if (has_sinks) {
    sink = sink_of(params, source(sinks, is_half_sinks), rows.b, place.head, place.query);
  }
  HeadRows k_rows = head_rows(source(k, is_half_kv), params.k, rows.b, rows.kv_head);
  HeadRows v_rows = head_rows(source(v, is_half_kv), params.v, rows.b, rows.kv_head);
  ResultRow result;
  result.o = after(target(o), offset_of(params.o, rows.b, place.query, place.head));
  result.rounded = result.o;
  result.channel = channel;
  if (has_rounded) {
    result.rounded =
        after(target(rounded_o, true), offset_of(params.rounded, rows.b, place.query, place.head));
  }
  Int64 stat = stat_index(params, rows.b, place.head, place.query);
  OwnedQueries<Shape::kRunBlocks, Shape::kRuns> own;
  own.seen = sights.own;
  own.sums = no_sums();
#pragma clang loop unroll(full)
  for (Int32 run = 0; run < Shape::kRuns; ++run) {
    load_row(after(source(q, is_half_q), offset_of(params.q, rows.b, place.query, place.head)),
             channel + run * Shape::kRunChannels, params.hd, at, own.q[run]);
    set_zero(own.o[run]);
  }

  // Tiles start at multiples of their size, so that a row's sums do not depend on its neighbours.
  bool empty = is_empty(keys);
  Int32 first = keys.begin / Shape::kKeys * Shape::kKeys;
  Int64 k_step = Shape::kKeys * k_rows.stride;
  Int64 v_step = Shape::kKeys * v_rows.stride;
  Source k_from = after(k_rows.row0, first * k_rows.stride);
  Source v_from = after(v_rows.row0, first * v_rows.stride);
  if (!empty) {
    TileRows present = {keys.begin - first, keys.end - first};
    stage_rows<kHd, Shape::kKeys, Shape::kThreads, kAbsentRowsAreOthers>(
        k_from, k_rows.stride, present, params.hd, thread_, k_tile);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
  bool first_run = true;
  for (;;) {
    Int32 next = first + Shape::kKeys;
    bool last = next >= keys.end;
    if (!empty) {
      BlockSpan span = block_span(seen, own.seen, own.seen, first, Shape::kKeys);
      TileRows present = {keys.begin - first, keys.end - first};
      bool finite = stage_rows<kHd, Shape::kKeys, Shape::kThreads, kAbsentRowsAreZeros>(
          v_from, v_rows.stride, present, params.hv, thread_, v_tile);
      leave_vote(votes, finite, simdgroup, lane);
      Blocks<Shape::kKeyBlocks> p;
      multiply_keys<Shape::kRunBlocks, Shape::kRuns>(own.q, k_tile + channel, Shape::kStride, span,
                                                     at, p);
      if (Shape::kParts > 1) {
#pragma clang loop unroll(full)
        for (Int32 b = 0; b < Shape::kKeyBlocks; ++b) {
          leave_block(exchange, Int32(simdgroup) * Shape::kKeyBlocks + b, lane, p.at[b]);
        }
      }
      metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
      k_from = after(k_from, k_step);
      v_from = after(v_from, v_step);
      if (!last) {
        TileRows ahead = {0, keys.end - next};
        stage_rows<kHd, Shape::kKeys, Shape::kThreads, kAbsentRowsAreOthers>(
            k_from, k_rows.stride, ahead, params.hd, thread_, k_tile);
      }
      if (span.from < span.to) {
        if (Shape::kParts > 1) {
#pragma clang loop unroll(full)
          for (Int32 b = 0; b < Shape::kKeyBlocks; ++b) {
            p.at[b] = sum_of_parts<Shape::kParts>(exchange, row_block * Shape::kKeyBlocks + b,
                                                  Shape::kRowBlocks * Shape::kKeyBlocks, lane);
          }
        }
        finite = span.whole || unanimous<Shape::kSimdgroups>(votes);
        uint bits;
        float alpha =
            softmax_step(options, span, own.seen, pairs, first + at.column, p, own.sums, bits);
#pragma clang loop unroll(full)
        for (Int32 run = 0; run < Shape::kRuns; ++run) {
          add_values(p, alpha, span, own.seen, bits, first,
                     v_tile + channel + run * Shape::kRunChannels, Shape::kStride, finite, at,
                     own.o[run]);
        }
      }
    }
    if (last || next % kSplitKeys == 0) {
      if (exists) {
        end_run(own, first_run, last, sink, result, params.hv, at);
        if (channel == 0 && at.column == 0) {
          row_max[stat] = own.total.m;
          row_sum[stat] = own.total.l;
        }
      }
      first_run = false;
    }
    if (last) break;
    first = next;
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
}
