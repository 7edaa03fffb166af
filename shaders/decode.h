// Few queries against many keys (Tq <= kMaxDecodeQueries): the forward with its keys split over
// threadgroups, and the kernel that puts the parts together, in the order of the keys.
#pragma once

#include "fused_forward.h"

namespace forge {

// The share of split number `split`: whole tiles, so that no tile meets the next split's keys.
static inline IndexRange split_keys(IndexRange keys, Int64 split, Int64 splits) {
  Int64 share = larger(ceil_div(keys.end - keys.begin, splits), Int64(kMinDecodeKeys));
  share = round_up(share, kQueryRows);
  keys.begin += split * share;
  keys.end = smaller(keys.end, keys.begin + share);
  return keys;
}

}  // namespace forge

// Tile number row_tile * splits + split: unfinished rows go to `partial`.
template <int kHd, GpuFamily kGpu = kAnyGpu, int kThreads = ForwardShape<kHd, kGpu>::kThreads>
[[kernel, max_total_threads_per_threadgroup(kThreads)]] void attention_decode(
    device const float* q [[buffer(kBufferQ)]], device const float* k [[buffer(kBufferK)]],
    device const float* v [[buffer(kBufferV)]], device float* partial [[buffer(kBufferPartial)]],
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
  Int64 splits = decode_splits(params.Tk);
  Int64 split = (span.begin + Int64(tile)) % splits;
  RowTile rows = row_tile(params, ranges, (span.begin + Int64(tile)) / splits);
  Lane at = lane_place(lane, simdgroup);
  ForwardArrays arrays = {q, k, v};
  ForwardMemory memory = {k_tile, v_tile, exchange, votes};
  IndexRange keys = split_keys(keys_of_rows(rows, rows.first, kQueryRows).any, split, splits);
  OnlineSoftmax<Shape::kOwnBlocks> state =
      attend<kHd, kGpu>(params, rows, keys, arrays, memory, at);

  Int64 r = rows.first + at.simdgroup % Shape::kRowBlocks * kBlockSize + at.row;
  Int32 part = at.simdgroup / Shape::kRowBlocks;
  if (r >= rows.end) return;
  device float* to =
      partial + (stat_index(params, rows, r) * splits + split) * decode_partial_floats(params.hd);
  if (part == 0 && at.column == 0) {
    to[0] = state.m;
    to[1] = state.l;
  }
#pragma unroll
  for (Int32 n = 0; n < Shape::kOwnBlocks; ++n) {
    Int32 c = (part * Shape::kOwnBlocks + n) * kBlockSize + at.column;
    store_pair(to + 2, c, params.hd, state.o.at[n]);
  }
}

// One row (b, h, i) a simdgroup: the maximum of all splits, then their sums in order.
kernel void attention_decode_combine(device const float* partial [[buffer(kBufferPartial)]],
                                     device float* o [[buffer(kBufferO)]],
                                     device float* row_max [[buffer(kBufferRowMax)]],
                                     device float* row_sum [[buffer(kBufferRowSum)]],
                                     device const AttnRange* ranges [[buffer(kBufferRanges)]],
                                     constant AttnParams& given [[buffer(kBufferParams)]],
                                     constant AttnSpan& span [[buffer(kBufferSpan)]],
                                     uint tile [[threadgroup_position_in_grid]],
                                     uint lane [[thread_index_in_simdgroup]]) {
  Int64 row = span.begin + Int64(tile);
  if (row >= span.end) return;
  AttnParams params = specialized(given);
  Int64 b = row / (params.H * params.Tq);
  Int64 h = row / params.Tq % params.H;
  Int64 i = row % params.Tq;
  IndexRange seen = visible_keys(attn_band(params, ranges[b]), i);
  bool live = !is_empty(seen);
  Int64 splits = decode_splits(params.Tk);
  Int64 part_floats = decode_partial_floats(params.hd);
  device const float* parts = partial + row * splits * part_floats;
  device float* o_row = o + element_offset(params.o, b, i, h);

  float m = -INFINITY;
  for (Int64 split = 0; split < splits; ++split) m = larger(parts[split * part_floats], m);
  float base = m == -INFINITY ? 0.0f : m;
  float l = 0.0f;
  for (Int64 split = 0; split < splits; ++split) {
    device const float* part = parts + split * part_floats;
    l = metal::fma(part[1], exp_of(part[0] - base), l);
  }
  if (live && l == 0.0f) l = NAN;  // all visible scores are -inf
  for (Int32 c = Int32(lane); c < params.hd; c += kSimdgroupWidth) {
    float sum = 0.0f;
    for (Int64 split = 0; split < splits; ++split) {
      device const float* part = parts + split * part_floats;
      if (part[1] == 0.0f) continue;  // saw no key
      sum = metal::fma(part[2 + c], exp_of(part[0] - base), sum);
    }
    o_row[c] = live ? sum / l : 0.0f;
  }
  if (lane == 0) {
    row_max[row] = live ? m : -INFINITY;
    row_sum[row] = live ? l : 0.0f;
  }
}
