// The backward: d_row once, then dq with 32 query rows to a threadgroup and dk, dv with 32 keys to
// a threadgroup. Both recompute p from the saved statistics; the scores are those of the forward,
// bit for bit: the query is the left operand everywhere, and the channels come in the same order.
#pragma once

#include "fused.h"
#include "shared/buffer_indices.h"

namespace forge {

template <int kHd, GpuFamily kGpu>
struct BackwardShape {
  enum Sizes {
    kParts = fused_tiling(kGpu, kHd).parts,  // simdgroups a row block
    kOwnBlocks = kHd / kParts / kBlockSize,  // blocks of channels a simdgroup
    kOwnChannels = kOwnBlocks * kBlockSize,
    kSimdgroups = backward_simdgroups(fused_tiling(kGpu, kHd)),
    kThreads = kSimdgroups * kSimdgroupWidth,
    kRowBlocks = kQueryRows / kBlockSize,  // of dq's 32 rows, and of dk's and dv's 32 keys
    kStride = tile_stride(kHd),
    kKeys = fused_tiling(kGpu, kHd).dq_keys,
    kKeyBlocks = kKeys / kBlockSize,
    kKeyTileFloats = tile_floats(kKeys, kHd),
    kKeyExchangeFloats = exchange_floats(kParts, kQueryRows, kKeys, 2),
    kRows = fused_tiling(kGpu, kHd).dkv_rows,
    kRowTileBlocks = kRows / kBlockSize,
    kRowTileFloats = tile_floats(kRows, kHd),
    kRowExchangeFloats = exchange_floats(kParts, kRows, kOwnedKeys, 2),
  };
};

// What the backward knows of a lane's row.
struct RowStatistics {
  float m;
  float inverse_l;
  float d;
};

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

static inline Gradients gradients_of(AttnParams params, Products products, RowStatistics row) {
  Scores scores = scores_of(products.s, params.scale, params.softcap);
  Gradients of;
  of.p = probabilities(scores.s, row.m, row.inverse_l);
  of.ds = of.p * (products.dp - row.d);
  if (has_softcap) of.ds = of.ds * metal::fma(-scores.t, scores.t, Block(1.0f, 1.0f));
  return of;
}

// The parts' products of block `slot` of `slots`, left in `exchange` before a barrier and added
// after.
static inline void leave_products(threadgroup float* exchange, Int32 part, Int32 slots, Int32 slot,
                                  Lane at, Products products) {
  leave_block(exchange, 2 * (part * slots + slot), at, products.s);
  leave_block(exchange, 2 * (part * slots + slot) + 1, at, products.dp);
}

template <int kParts>
static inline Products add_products(threadgroup const float* exchange, Int32 slots, Int32 slot,
                                    Lane at) {
  Products products;
  products.s = sum_of_parts<kParts>(exchange, 2 * slot, 2 * slots, at);
  products.dp = sum_of_parts<kParts>(exchange, 2 * slot + 1, 2 * slots, at);
  return products;
}

}  // namespace forge

using namespace forge;

// d_row = dout . o - dlse: a simdgroup a row, 8 rows in turn. The tiles are 32 rows (b, h, i).
kernel void attention_fused_bwd_d(
    device const float* o [[buffer(kBufferO)]], device const float* dout [[buffer(kBufferDout)]],
    device const float* dlse [[buffer(kBufferDlse), function_constant(has_dlse)]],
    device float* d_row [[buffer(kBufferDRow)]],
    constant AttnParams& given [[buffer(kBufferParams)]],
    constant AttnSpan& span [[buffer(kBufferSpan)]], uint tile [[threadgroup_position_in_grid]],
    uint simdgroup [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  if (span.begin + Int64(tile) >= span.end) return;
  AttnParams params = given;
  Int64 first = (span.begin + Int64(tile)) * kQueryRows + Int64(simdgroup) * kBlockSize;
  Int64 end = smaller(first + kBlockSize, params.B * params.H * params.Tq);
  for (Int64 row = first; row < end; ++row) {
    Int64 b = row / (params.H * params.Tq);
    Int64 h = row / params.Tq % params.H;
    Int64 i = row % params.Tq;
    device const float* o_row = o + element_offset(params.o, b, i, h);
    device const float* dout_row = dout + element_offset(params.dout, b, i, h);
    float sum = 0.0f;
    for (Int32 c = Int32(lane); c < params.hd; c += kSimdgroupWidth) {
      sum = metal::fma(dout_row[c], o_row[c], sum);
    }
    for (ushort other = 16; other > 0; other /= 2) sum += metal::simd_shuffle_xor(sum, other);
    if (lane == 0) {
      if (has_dlse) sum = sum - dlse[row];
      d_row[row] = sum;
    }
  }
}
