// The backward: d_row once, then dq with 32 query rows to a threadgroup and dk, dv with 32 keys to
// a threadgroup. Both recompute p from the saved statistics; the scores are expected to be those of
// the forward, bit for bit: the query is the left operand everywhere, and the channels come in the
// same order.
#pragma once

#include "fused.h"
#include "pairs.h"
#include "shared/buffer_indices.h"

namespace forge {

// What a simdgroup has of the channels, in dq and in dk and dv.
template <int kHd, GpuFamily kGpu>
struct BackwardShape {
  enum Sizes {
    kParts = fused_tiling(kGpu, kHd).parts,
    kOwnBlocks = kHd / kParts / kBlockSize,
    kOwnChannels = kOwnBlocks * kBlockSize,
    kStride = tile_stride(kHd),
  };
};

// What the backward knows of a query row.
struct RowStatistics {
  float m;
  float inverse_l;
  float d;
};

METAL_FUNC RowStatistics row_statistics(float m, float l, float d) {
  RowStatistics row = {m, 1.0f / l, d};
  return row;
}

// A dead row has a sum of 0, any other at least 1, or NaN; one whose sink is all that counts is
// made to look dead. What is computed of a dead one is NaN where its scores or what its query and
// dout hold make it so: it is to be passed over by selection.
METAL_FUNC bool is_live(RowStatistics row) { return row.inverse_l != INFINITY; }

// Sinks, and the results of the forward that say which rows are theirs alone.
struct SinkRows {
  Source sinks;
  device const float* o;
};

// Whether a row's sink is all that counts there, by what the forward left of it: it saw no key, or
// none with another score than -inf (or keys so far below the sink that they left nothing). Then
// query and dout are not to be read, which may be NaN.
METAL_FUNC bool is_sink_alone(constant AttnParams& params, SinkRows rows, Int32 b, Int32 h, Int32 i,
                              float m, float l) {
  if (l != 1.0f || m != sink_of(params, rows.sinks, b, h, i)) return false;
  device const float* o = rows.o + offset_of(params.o, b, i, h);
  for (Int32 c = 0; c < params.hv; ++c) {
    if (o[c] != 0.0f) return false;
  }
  return true;
}

// Of one block of scores.
struct Gradients {
  Block p;
  Block ds;  // scale left out
};

// s = q k and dp = dout v, before the scale.
struct Products {
  Block s;
  Block dp;
};

METAL_FUNC Gradients gradients_of(ScoreOptions options, Products products, Block bias,
                                  RowStatistics row) {
  Scores scores = scores_of(products.s, options);
  if (has_bias) scores.s = scores.s + bias;
  Gradients of;
  of.p = probabilities(scores.s, row.m, row.inverse_l);
  of.ds = Block(of.p.x * (products.dp.x - row.d), of.p.y * (products.dp.y - row.d));
  if (has_softcap) of.ds = of.ds * metal::fma(-scores.t, scores.t, Block(1.0f, 1.0f));
  return of;
}

}  // namespace forge

using namespace forge;

// d_row = dout . o - dlse: a simdgroup a row, 8 rows in turn. Tiles are 32 queries of a head.
kernel void attention_fused_bwd_d(
    device const float* o [[buffer(kBufferO)]], device const uchar* dout [[buffer(kBufferDout)]],
    device const float* dlse [[buffer(kBufferDlse), function_constant(has_dlse)]],
    device const float* row_max [[buffer(kBufferRowMax), function_constant(has_sinks)]],
    device const float* row_sum [[buffer(kBufferRowSum), function_constant(has_sinks)]],
    device const uchar* sinks [[buffer(kBufferSinks), function_constant(has_sinks)]],
    device float* d_row [[buffer(kBufferDRow)]],
    constant AttnParams& params [[buffer(kBufferParams)]],
    constant AttnGrid& grid [[buffer(kBufferGrid)]], uint3 group [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  Int32 b = grid.batch + Int32(group.z);
  Int32 h = grid.head + Int32(group.y);
  Int32 first = (grid.tile + Int32(group.x)) * kQueryRows + Int32(simdgroup) * kBlockSize;
  Int32 end = smaller(first + kBlockSize, Int32(params.Tq));
  HeadRows o_rows = head_rows(source(o), params.o, b, h);
  HeadRows dout_rows = head_rows(source(dout, is_half_q), params.dout, b, h);
  for (Int32 i = first; i < end; ++i) {
    Source o_row = after(o_rows.row0, i * o_rows.stride);
    Source dout_row = after(dout_rows.row0, i * dout_rows.stride);
    Int64 row = stat_index(params, b, h, i);
    // Of a row whose sink is all that counts dout is not read.
    Int32 channels = params.hv;
    if (has_sinks) {
      SinkRows rows = {source(sinks, is_half_sinks), o};
      if (is_sink_alone(params, rows, b, h, i, row_max[row], row_sum[row])) channels = 0;
    }
    float sum = 0.0f;
    for (Int32 c = Int32(lane) * 4; c < channels; c += 4 * kSimdgroupWidth) {
      float4 x = load_four(dout_row, c, channels);
      float4 y = load_four(o_row, c, channels);
      sum = metal::fma(x.x, y.x, sum);
      sum = metal::fma(x.y, y.y, sum);
      sum = metal::fma(x.z, y.z, sum);
      sum = metal::fma(x.w, y.w, sum);
    }
    for (ushort other = 16; other > 0; other /= 2) sum += metal::simd_shuffle_xor(sum, other);
    if (lane == 0) {
      if (has_dlse) sum = sum - dlse[row];
      d_row[row] = sum;
    }
  }
}
