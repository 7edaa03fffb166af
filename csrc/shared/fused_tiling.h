// How the fused Metal kernels cut a problem: read by the host, which sizes grids, and by the
// shaders, which size their tiles. No number here was timed on an Apple GPU by us. Where they come
// from:
//   query rows, owned keys   32 = 4 row blocks of 8: what public float32 kernels use (MLX 32,
//                            MFA 16 to 32); device traffic is counted against tiles of 32.
//   parts                    at most 64 channels to a simdgroup, so that the four operands that
//                            dk and dv keep (k, v, dk, dv) are 64 of the 128 registers of a lane,
//                            and the forward's two (q, o) as many at hd = 128.
//   keys, rows               the widest of 8, 16 and 32 that keeps threadgroup memory below 32 KB,
//                            and room for two threadgroups in the 60 KB of a core; MLX has 32 below
//                            hd = 128 and 16 from there. Backward tiles are narrower where parts
//                            exchange their scores.
//   padding of rows          4 floats, as MLX: neighbouring rows start in other banks.
#pragma once

#include "shared/attn_params.h"

namespace forge {

enum FusedSizes {
  kBlockSize = 8,        // rows and columns of one matrix product
  kSimdgroupWidth = 32,  // lanes
  kQueryRows = 32,       // query rows a threadgroup of the forward, d_row, dq and decode owns
  kRowPadding = 4,       // floats after each row of a tile in threadgroup memory
  // Keys are cut after every kSplitKeys, wherever a row begins to see them. The forward adds up
  // what it has of each run of keys, in order; decode gives each run to a simdgroup, and adds
  // likewise.
  kSplitShift = 9,
  kSplitKeys = 1 << kSplitShift,
  kMaxDecodeQueries = 8,  // Tq up to which it does
  kDecodeSimdgroups = 2,  // of a threadgroup: they share nothing, and there may be fewer of them
                          // than a GPU has places for
  kDbiasSimdgroups = 4,   // of a threadgroup: each has 8 rows and 8 keys of dbias of its own
  kMaxFusedHeadDim = 256,
  kMaxFusedLength = 0x3fffff00,  // rep * Tq and Tk: positions and their sums have 32 bits
  kMaxThreadgroupBytes = 32768,
};

// Whose numbers a row of the table holds. A family that somebody has measured gets a name here, its
// rows in fused_tiling and its instantiations in shaders/fused.metal.
enum GpuFamily {
  kAnyGpu = 0,
};

struct FusedTiling {
  Int32 head_dim;       // channels, those of the problem and zeros
  Int32 parts;          // runs of channels; a score is the sum over them, in order, of dot products
  Int32 forward_parts;  // simdgroups that share a row block in the forward: 1, or a part each
  Int32 forward_keys;   // keys a tile of the forward and of decode
  Int32 dq_keys;        // keys a tile of dq; its row blocks have a simdgroup a part
  Int32 dkv_keys;  // keys a threadgroup of dk and dv owns; their blocks have two simdgroups a part,
                   // one for each of dk and dv
  Int32 dkv_rows;  // query rows a tile of dk and dv
};

// The row for a head dim: the first that it fits.
FORGE_INLINE constexpr FusedTiling fused_tiling(GpuFamily /*gpu*/, Int32 hd) {
  return hd <= 32    ? FusedTiling{32, 1, 1, 32, 32, 32, 32}
         : hd <= 64  ? FusedTiling{64, 1, 1, 32, 32, 32, 32}
         : hd <= 80  ? FusedTiling{80, 2, 1, 32, 16, 32, 16}
         : hd <= 96  ? FusedTiling{96, 2, 1, 32, 16, 32, 16}
         : hd <= 128 ? FusedTiling{128, 2, 2, 16, 16, 32, 16}
         : hd <= 192 ? FusedTiling{192, 3, 3, 16, 8, 16, 8}
                     : FusedTiling{256, 4, 4, 8, 8, 16, 8};
}

FORGE_INLINE constexpr Int32 tile_stride(Int32 head_dim) { return head_dim + kRowPadding; }

FORGE_INLINE constexpr Int32 tile_floats(Int32 rows, Int32 head_dim) {
  return rows * tile_stride(head_dim);
}

// Room for the parts' dot products, `products` of them an element, in pairs of floats; one pair
// where nothing is exchanged.
FORGE_INLINE constexpr Int32 exchange_pairs(Int32 parts, Int32 rows, Int32 columns,
                                            Int32 products) {
  return parts > 1 ? parts * rows * columns * products / 2 : 1;
}

FORGE_INLINE constexpr Int32 forward_simdgroups(FusedTiling tiling) {
  return kQueryRows / kBlockSize * tiling.forward_parts;
}

FORGE_INLINE constexpr Int32 dq_simdgroups(FusedTiling tiling) {
  return kQueryRows / kBlockSize * tiling.parts;
}

FORGE_INLINE constexpr Int32 dkv_simdgroups(FusedTiling tiling) {
  return tiling.dkv_keys / kBlockSize * tiling.parts * 2;
}

// s and dp of a tile of dk and dv, a part each, in pairs of floats.
FORGE_INLINE constexpr Int32 dkv_exchange_pairs(FusedTiling tiling) {
  return tiling.parts * tiling.dkv_rows * tiling.dkv_keys;
}

// Keys, values, exchanged scores and a flag a simdgroup.
FORGE_INLINE constexpr Int32 forward_threadgroup_bytes(FusedTiling tiling) {
  return 4 * (2 * tile_floats(tiling.forward_keys, tiling.head_dim) +
              2 * exchange_pairs(tiling.forward_parts, kQueryRows, tiling.forward_keys, 1) +
              forward_simdgroups(tiling));
}

// Keys, values, exchanged s and dp and a flag a simdgroup.
FORGE_INLINE constexpr Int32 dq_threadgroup_bytes(FusedTiling tiling) {
  return 4 *
         (2 * tile_floats(tiling.dq_keys, tiling.head_dim) +
          2 * exchange_pairs(tiling.parts, kQueryRows, tiling.dq_keys, 2) + dq_simdgroups(tiling));
}

// Rows of q and dout, three statistics a row, exchanged s and dp and a flag a simdgroup.
FORGE_INLINE constexpr Int32 dkv_threadgroup_bytes(FusedTiling tiling) {
  return 4 * (2 * tile_floats(tiling.dkv_rows, tiling.head_dim) + 3 * tiling.dkv_rows +
              2 * dkv_exchange_pairs(tiling) + dkv_simdgroups(tiling));
}

FORGE_INLINE constexpr bool tiling_fits(Int32 hd) {
  return forward_threadgroup_bytes(fused_tiling(kAnyGpu, hd)) <= kMaxThreadgroupBytes &&
         dq_threadgroup_bytes(fused_tiling(kAnyGpu, hd)) <= kMaxThreadgroupBytes &&
         dkv_threadgroup_bytes(fused_tiling(kAnyGpu, hd)) <= kMaxThreadgroupBytes;
}

static_assert(tiling_fits(32), "threadgroup memory");
static_assert(tiling_fits(64), "threadgroup memory");
static_assert(tiling_fits(80), "threadgroup memory");
static_assert(tiling_fits(96), "threadgroup memory");
static_assert(tiling_fits(128), "threadgroup memory");
static_assert(tiling_fits(192), "threadgroup memory");
static_assert(tiling_fits(256), "threadgroup memory");

// Tiles of 32 query rows.
FORGE_INLINE constexpr Int64 tiles_of(Int64 length) {
  return (length + kQueryRows - 1) / kQueryRows;
}

// Tiles of the keys that a threadgroup of dk and dv owns.
FORGE_INLINE constexpr Int64 key_tiles_of(FusedTiling tiling, Int64 Tk) {
  return (Tk + tiling.dkv_keys - 1) / tiling.dkv_keys;
}

// Runs of keys that decode can have to add up.
FORGE_INLINE constexpr Int64 decode_splits(Int64 Tk) {
  return (Tk + kSplitKeys - 1) >> kSplitShift;
}

// Floats of one row's partial result: hv unfinished channels, its maximum, its sum, and room to
// keep rows aligned to four.
FORGE_INLINE constexpr Int64 decode_partial_floats(Int64 hv) { return hv + 4; }

}  // namespace forge
