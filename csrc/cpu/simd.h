// The vectors of the target this file is compiled for: -DFORGE_TARGET=baseline|avx2|avx512|neon
// names the namespace, the compiler's target flags choose the width. Everything has internal
// linkage, so that a linker can never hand one target's code to another.
#pragma once

#include <cstdint>

#include "shared/attn_params.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#ifndef FORGE_TARGET
#error "compile with -DFORGE_TARGET=<name of the target>"
#endif

// Inner loops stand alone: inlined into one another they compete for registers.
#define FORGE_NOINLINE __attribute__((noinline))
#define FORGE_UNROLL _Pragma("GCC unroll 32")

namespace forge::cpu::FORGE_TARGET {
namespace {

using Real = float;             // the element type
using RealBits = std::int32_t;  // an integer of its size

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kVectorRegisters = 32;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
constexpr int kVectorRegisters = 16;
#elif defined(__aarch64__)
constexpr int kLanes = 4;
constexpr int kVectorRegisters = 32;
#else
constexpr int kLanes = 4;
constexpr int kVectorRegisters = 16;
#endif

#if defined(__FMA__) || defined(__aarch64__)
constexpr bool kHasFma = true;
#else
constexpr bool kHasFma = false;
#endif

constexpr int kVecBytes = kLanes * static_cast<int>(sizeof(Real));

typedef Real Vec __attribute__((vector_size(kVecBytes)));
typedef RealBits IntVec __attribute__((vector_size(kVecBytes)));  // a mask: all bits set, or none
typedef Real UnalignedVec __attribute__((vector_size(kVecBytes), aligned(sizeof(Real)), may_alias));

FORGE_INLINE Vec load(const Real* from) { return *reinterpret_cast<const UnalignedVec*>(from); }
FORGE_INLINE void store(Real* to, Vec x) { *reinterpret_cast<UnalignedVec*>(to) = x; }

FORGE_INLINE Vec broadcast(Real x) {
#if defined(__AVX512F__)
  return (Vec)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (Vec)_mm256_set1_ps(x);
#else
  return Vec{x, x, x, x};
#endif
}

FORGE_INLINE IntVec broadcast_int(RealBits x) { return IntVec{} + x; }

// 0, 1, 2, ...
FORGE_INLINE IntVec lane_numbers() {
#if defined(__AVX512F__)
  return IntVec{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif defined(__AVX2__)
  return IntVec{0, 1, 2, 3, 4, 5, 6, 7};
#else
  return IntVec{0, 1, 2, 3};
#endif
}

FORGE_INLINE IntVec bits_of(Vec x) { return (IntVec)x; }
FORGE_INLINE Vec from_bits(IntVec x) { return (Vec)x; }

FORGE_INLINE Vec select(IntVec mask, Vec yes, Vec no) { return mask ? yes : no; }

// a * b + c: one rounding where the target has fma, else two. Either way the same everywhere in one
// target, which is what makes a score the same float in every kernel.
FORGE_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return Vec{__builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1]),
             __builtin_fmaf(a[2], b[2], c[2]), __builtin_fmaf(a[3], b[3], c[3])};
#else
  return a * b + c;
#endif
}

// a > b ? a : b, exactly: b where either is NaN.
FORGE_INLINE Vec max(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_max_ps(0xffff, (__m512)a,
                                  (__m512)b);  // no undefined source: gcc 12 warns
#elif defined(__AVX2__)
  return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__x86_64__)
  return (Vec)_mm_max_ps((__m128)a, (__m128)b);
#else
  return a > b ? a : b;
#endif
}

FORGE_INLINE Vec abs(Vec x) { return from_bits(bits_of(x) & 0x7fffffff); }

// |magnitude| with the sign of sign.
FORGE_INLINE Vec copy_sign(Vec magnitude, Vec sign) {
  const RealBits sign_bit = INT32_MIN;
  return from_bits((bits_of(magnitude) & ~sign_bit) | (bits_of(sign) & sign_bit));
}

FORGE_INLINE bool any(IntVec mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask) != 0;
#elif defined(__x86_64__)
  return _mm_movemask_ps((__m128)mask) != 0;
#else
  return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
}

// The upper half of the lanes.
FORGE_INLINE void store_high_half(Real* to, Vec x) {
  typedef Real Half __attribute__((vector_size(kVecBytes / 2), aligned(sizeof(Real)), may_alias));
#if defined(__AVX512F__)
  *reinterpret_cast<Half*>(to) = __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
#elif defined(__AVX2__)
  *reinterpret_cast<Half*>(to) = __builtin_shufflevector(x, x, 4, 5, 6, 7);
#else
  *reinterpret_cast<Half*>(to) = __builtin_shufflevector(x, x, 2, 3);
#endif
}

// Lane i and the lane `distance` away change places; distance is a power of two.
template <int distance>
FORGE_INLINE Vec swap_lanes(Vec x) {
#if defined(__AVX512F__)
#define FORGE_SWAPPED(d)                                                                       \
  __builtin_shufflevector(x, x, 0 ^ d, 1 ^ d, 2 ^ d, 3 ^ d, 4 ^ d, 5 ^ d, 6 ^ d, 7 ^ d, 8 ^ d, \
                          9 ^ d, 10 ^ d, 11 ^ d, 12 ^ d, 13 ^ d, 14 ^ d, 15 ^ d)
#elif defined(__AVX2__)
#define FORGE_SWAPPED(d) \
  __builtin_shufflevector(x, x, 0 ^ d, 1 ^ d, 2 ^ d, 3 ^ d, 4 ^ d, 5 ^ d, 6 ^ d, 7 ^ d)
#else
#define FORGE_SWAPPED(d) __builtin_shufflevector(x, x, 0 ^ d, 1 ^ d, 2 ^ d, 3 ^ d)
#endif
  return FORGE_SWAPPED(distance);
#undef FORGE_SWAPPED
}

// Four lanes, and a vector's added to them, four by four in ascending order.
typedef Real FourLanes __attribute__((vector_size(16)));

FORGE_INLINE FourLanes add_quads(FourLanes sum, Vec x) {
#if defined(__AVX512F__)
  sum = sum + __builtin_shufflevector(x, x, 0, 1, 2, 3);
  sum = sum + __builtin_shufflevector(x, x, 4, 5, 6, 7);
  sum = sum + __builtin_shufflevector(x, x, 8, 9, 10, 11);
  return sum + __builtin_shufflevector(x, x, 12, 13, 14, 15);
#elif defined(__AVX2__)
  sum = sum + __builtin_shufflevector(x, x, 0, 1, 2, 3);
  return sum + __builtin_shufflevector(x, x, 4, 5, 6, 7);
#else
  return sum + x;
#endif
}

template <int distance = kLanes / 2>
FORGE_INLINE Real max_of_lanes(Vec x) {
  const Vec larger = max(x, swap_lanes<distance>(x));
  if constexpr (distance > 1) {
    return max_of_lanes<distance / 2>(larger);
  } else {
    return larger[0];
  }
}

// The 4x4 blocks that rows 0 to 3 hold in each of their 128-bit parts, transposed in place.
FORGE_INLINE void transpose_quads(Vec& r0, Vec& r1, Vec& r2, Vec& r3) {
#if defined(__AVX512F__)
#define FORGE_IN_PARTS(x, y, a, b, c, d)                                                     \
  __builtin_shufflevector(x, y, a, b, c, d, a + 4, b + 4, c + 4, d + 4, a + 8, b + 8, c + 8, \
                          d + 8, a + 12, b + 12, c + 12, d + 12)
#elif defined(__AVX2__)
#define FORGE_IN_PARTS(x, y, a, b, c, d) \
  __builtin_shufflevector(x, y, a, b, c, d, a + 4, b + 4, c + 4, d + 4)
#else
#define FORGE_IN_PARTS(x, y, a, b, c, d) __builtin_shufflevector(x, y, a, b, c, d)
#endif
  const Vec t0 = FORGE_IN_PARTS(r0, r1, 0, kLanes, 1, kLanes + 1);
  const Vec t1 = FORGE_IN_PARTS(r0, r1, 2, kLanes + 2, 3, kLanes + 3);
  const Vec t2 = FORGE_IN_PARTS(r2, r3, 0, kLanes, 1, kLanes + 1);
  const Vec t3 = FORGE_IN_PARTS(r2, r3, 2, kLanes + 2, 3, kLanes + 3);
  r0 = FORGE_IN_PARTS(t0, t2, 0, 1, kLanes, kLanes + 1);
  r1 = FORGE_IN_PARTS(t0, t2, 2, 3, kLanes + 2, kLanes + 3);
  r2 = FORGE_IN_PARTS(t1, t3, 0, 1, kLanes, kLanes + 1);
  r3 = FORGE_IN_PARTS(t1, t3, 2, 3, kLanes + 2, kLanes + 3);
#undef FORGE_IN_PARTS
}

// kLanes x kLanes, in place, once transpose_quads has been over each four rows.
FORGE_INLINE void transpose_parts([[maybe_unused]] Vec (&r)[kLanes]) {
#if defined(__AVX512F__)
#define FORGE_EVEN_PARTS(x, y) \
  __builtin_shufflevector(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define FORGE_ODD_PARTS(x, y) \
  __builtin_shufflevector(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
  FORGE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const Vec even_01 = FORGE_EVEN_PARTS(r[i], r[i + 4]), odd_01 = FORGE_ODD_PARTS(r[i], r[i + 4]);
    const Vec even_23 = FORGE_EVEN_PARTS(r[i + 8], r[i + 12]);
    const Vec odd_23 = FORGE_ODD_PARTS(r[i + 8], r[i + 12]);
    r[i] = FORGE_EVEN_PARTS(even_01, even_23);
    r[i + 4] = FORGE_EVEN_PARTS(odd_01, odd_23);
    r[i + 8] = FORGE_ODD_PARTS(even_01, even_23);
    r[i + 12] = FORGE_ODD_PARTS(odd_01, odd_23);
  }
#undef FORGE_EVEN_PARTS
#undef FORGE_ODD_PARTS
#elif defined(__AVX2__)
  FORGE_UNROLL
  for (int i = 0; i < 4; ++i) {
    const Vec a = r[i], b = r[i + 4];
    r[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
    r[i + 4] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
  }
#endif
}

// kLanes x kLanes, in place.
FORGE_INLINE void transpose(Vec (&r)[kLanes]) {
  FORGE_UNROLL
  for (int i = 0; i < kLanes; i += 4) transpose_quads(r[i], r[i + 1], r[i + 2], r[i + 3]);
  transpose_parts(r);
}

}  // namespace
}  // namespace forge::cpu::FORGE_TARGET
