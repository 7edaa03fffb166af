// One description of an attention problem, read by C++ and by Metal shaders alike.
#pragma once

#ifdef __METAL_VERSION__
#include <metal_stdlib>
// For whoever compiles this text with other defaults than ours. At file scope they hold for all
// that follows.
#pragma METAL fp math_mode(safe)
#pragma METAL fp contract(off)
#define FORGE_INLINE METAL_FUNC
#else
#include <cstddef>
#include <cstdint>
// Internal linkage: the same header is compiled for several CPU targets, and the linker must never
// pick another target's copy of a function.
#define FORGE_INLINE static inline __attribute__((always_inline))
#define FORGE_MEMBER inline __attribute__((always_inline))  // of a struct
#endif

namespace forge {

#ifdef __METAL_VERSION__
typedef int Int32;
typedef long Int64;
#else
using Int32 = std::int32_t;
using Int64 = std::int64_t;
#endif

// Element (not byte) strides of one [B, T, heads, hd] array; the last axis has unit stride. `first`
// is where element [0, 0, 0, 0] lies from the pointer that goes with them: 0 on the CPU; a GPU
// buffer starts at the array's lowest address, and with a negative stride that is another element.
struct AttnStrides {
  Int64 batch;
  Int64 row;
  Int64 head;
  Int64 first;
};

// Likewise of an array over pairs of queries and keys, each axis 1 or that of [B, H, Tq, Tk]: 0
// along an axis of 1. An array over rows, [B, H, Tq], has no step along keys.
struct AttnPairStrides {
  Int64 batch;
  Int64 head;
  Int64 row;
  Int64 key;
  Int64 first;
};

// Which of its axes are not 1, or are those of the problem.
enum AttnPairAxes { kBatchAxis = 1, kHeadAxis = 2, kRowAxis = 4, kKeyAxis = 8 };

// Where a sequence, or one of its queries, stands: query i is at key position i + query_offset, and
// does not see keys outside [key_start, key_end).
struct AttnRange {
  Int64 query_offset;
  Int64 key_start;
  Int64 key_end;
};

// Sizes, options and strides. Real is float for every device; double exists on the CPU only.
template <typename Real>
struct AttnParamsOf {
  Int64 B;             // batch
  Int64 Tq;            // query length
  Int64 Tk;            // key length
  Int64 window_left;   // keys seen to the left of the query's position, self not counted; -1: all
  Int64 window_right;  // likewise to the right
  AttnStrides q;
  AttnStrides k;
  AttnStrides v;
  AttnStrides o;
  AttnStrides dout;
  AttnStrides dq;
  AttnStrides dk;
  AttnStrides dv;
  AttnStrides rounded;
  AttnPairStrides bias;
  AttnPairStrides mask;
  AttnPairStrides sinks;
  AttnPairStrides dbias;
  AttnPairStrides dsinks;
  Int32 H;           // query heads
  Int32 Hkv;         // key/value heads; query head h reads kv head h / (H / Hkv)
  Int32 hd;          // head dim, of q and k
  Int32 hv;          // of v and o
  Int32 causal;      // 0 or 1
  Int32 runs;        // 1: there is a range for each query, [B, Tq]; 0: for each sequence
  Int32 dbias_axes;  // AttnPairAxes; over the others its terms are summed
  Int32 dsinks_axes;
  Real scale;    // x = scale * (q . k)
  Real softcap;  // s = softcap * tanh(x / softcap); 0: off
};

typedef AttnParamsOf<float> AttnParams;

// The part of a problem that one GPU dispatch computes: rows, or tiles of rows, numbered b-major.
struct AttnSpan {
  Int64 begin;
  Int64 end;
};

// Position of element (b, t, h, 0) in a strided [B, T, heads, hd] array.
FORGE_INLINE Int64 element_offset(AttnStrides strides, Int64 b, Int64 t, Int64 h) {
  return strides.first + b * strides.batch + t * strides.row + h * strides.head;
}

// Position of pair (b, h, i, j); of row (b, h, i) with j = 0.
FORGE_INLINE Int64 pair_offset(AttnPairStrides strides, Int64 b, Int64 h, Int64 i, Int64 j) {
  return strides.first + b * strides.batch + h * strides.head + i * strides.row + j * strides.key;
}

#ifndef __METAL_VERSION__
static_assert(sizeof(AttnStrides) == 32, "layout shared with the shaders");
static_assert(sizeof(AttnSpan) == 16, "layout shared with the shaders");
static_assert(sizeof(AttnRange) == 24, "layout shared with the shaders");
static_assert(sizeof(AttnParams) == 568, "layout shared with the shaders");
static_assert(offsetof(AttnParams, window_left) == 24, "layout shared with the shaders");
static_assert(offsetof(AttnParams, q) == 40, "layout shared with the shaders");
static_assert(offsetof(AttnParams, dv) == 264, "layout shared with the shaders");
static_assert(offsetof(AttnParams, rounded) == 296, "layout shared with the shaders");
static_assert(offsetof(AttnParams, bias) == 328, "layout shared with the shaders");
static_assert(offsetof(AttnParams, dsinks) == 488, "layout shared with the shaders");
static_assert(offsetof(AttnParams, H) == 528, "layout shared with the shaders");
static_assert(offsetof(AttnParams, scale) == 560, "layout shared with the shaders");
static_assert(offsetof(AttnParams, softcap) == 564, "layout shared with the shaders");
#endif

}  // namespace forge
