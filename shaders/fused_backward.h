// The backward: d_row once, then dq with 32 query rows to a threadgroup and dk, dv with 32 keys to
// a threadgroup. Both recompute p from the saved statistics; the scores are expected to be those of
// the forward, bit for bit: the query is the left operand everywhere, and the channels come in the
// same order.
#pragma once

#include "fused.h"
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

// A dead row has a sum of 0, any other at least 1, or NaN. What is computed of a dead one is NaN
// where its scores or what its query and dout hold make it so: it is to be passed over by
// selection.
METAL_FUNC bool is_live(RowStatistics row) { return row.inverse_l != INFINITY; }

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

METAL_FUNC Gradients gradients_of(ScoreOptions options, Products products, RowStatistics row) {
  Scores scores = scores_of(products.s, options);
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
    float sum = 0.0f;
    for (Int32 c = Int32(lane) * 4; c < params.hd; c += 4 * kSimdgroupWidth) {
      float4 x = load_four(dout_row, c, params.hd);
      float4 y = load_four(o_row, c, params.hd);
      sum = metal::fma(x.x, y.x, sum);
      sum = metal::fma(x.y, y.y, sum);
      sum = metal::fma(x.z, y.z, sum);
      sum = metal::fma(x.w, y.w, sum);
    }
    for (ushort other = 16; other > 0; other /= 2) sum += metal::simd_shuffle_xor(sum, other);
    if (lane == 0) {
      Int64 row = stat_index(params, b, h, i);
      if (has_dlse) sum = sum - dlse[row];
      d_row[row] = sum;
    }
  }
}
