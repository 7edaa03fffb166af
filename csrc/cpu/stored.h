// The arrays' elements on their way into vectors and back: what packing and decode read, and what
// the results are written with. They are templates over the stored type and know no more of it than
// the overloads here: load and store (of float32 in simd.h), load_quads, load_partial,
// store_partial. All that lies between is float32. A half is widened exactly, subnormals too, and
// rounded to nearest, ties to even.
#pragma once

#include <cstring>

#include "core/half.h"
#include "core/operands.h"
#include "cpu/simd.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace forge::cpu::FORGE_TARGET {
namespace {

// Four elements from each of kLanes / 4 places, `rows` pointers apart, one 128-bit part each.
FORGE_INLINE Vec load_quads(const Real* const* rows, std::int64_t at) {
  typedef Real Quad __attribute__((vector_size(16), aligned(sizeof(Real)), may_alias));
  const auto quad = [&](int row) { return *reinterpret_cast<const Quad*>(rows[row] + at); };
#if defined(__AVX512F__)
  const auto low = __builtin_shufflevector(quad(0), quad(4), 0, 1, 2, 3, 4, 5, 6, 7);
  const auto high = __builtin_shufflevector(quad(8), quad(12), 0, 1, 2, 3, 4, 5, 6, 7);
  return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
#elif defined(__AVX2__)
  return __builtin_shufflevector(quad(0), quad(4), 0, 1, 2, 3, 4, 5, 6, 7);
#else
  return quad(0);
#endif
}

// The first n lanes (0 <= n <= kLanes) from memory, zeros after; nothing past them is touched.
FORGE_INLINE Vec load_partial(const Real* from, int n) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1u), from);
#elif defined(__AVX2__)
  return (Vec)_mm256_maskload_ps(from, (__m256i)(lane_numbers() < n));
#else
  Vec x{};
  for (int lane = 0; lane < n; ++lane) x[lane] = from[lane];
  return x;
#endif
}

FORGE_INLINE void store_partial(Real* to, Vec x, int n) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << n) - 1u), (__m512)x);
#elif defined(__AVX2__)
  _mm256_maskstore_ps(to, (__m256i)(lane_numbers() < n), (__m256)x);
#else
  for (int lane = 0; lane < n; ++lane) to[lane] = x[lane];
#endif
}

// The bits of kLanes halves, and of their float32.
typedef std::uint16_t HalfVec __attribute__((vector_size(kVecBytes / 2)));
typedef std::uint32_t BitsVec __attribute__((vector_size(kVecBytes)));

FORGE_INLINE Vec widened(HalfVec x, BFloat16) {
  return (Vec)(__builtin_convertvector(x, BitsVec) << 16);
}

FORGE_INLINE HalfVec rounded(Vec x, BFloat16) {
  const BitsVec bits = (BitsVec)x, upper = bits >> 16;
  const BitsVec nearest = (bits + 0x7fff + (upper & 1)) >> 16;
  return __builtin_convertvector(x != x ? upper | 0x40 : nearest, HalfVec);
}

FORGE_INLINE Vec widened(HalfVec x, Float16) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_cvtph_ps(0xffff, (__m256i)x);
#elif defined(__AVX2__)
  return (Vec)_mm256_cvtph_ps((__m128i)x);
#elif defined(__aarch64__)
  return (Vec)vcvt_f32_f16((float16x4_t)x);
#else
  const BitsVec bits = __builtin_convertvector(x, BitsVec), size = (bits & 0x7fff) << 13;
  // A subnormal's bits under the exponent of 2^-14, which is then taken away: exact.
  constexpr std::uint32_t kBias = (127 - 15) << 23, kSmallest = kBias + (1 << 23);
  const BitsVec smallest = BitsVec{} + kSmallest;
  const BitsVec subnormal = (BitsVec)((Vec)(size + smallest) - (Vec)smallest);
  const BitsVec number = size < 0x00800000 ? subnormal : size + kBias;
  const BitsVec infinite = size | 0x7f800000;
  return (Vec)((bits & 0x8000) << 16 | (size >= 0x0f800000 ? infinite : number));
#endif
}

FORGE_INLINE HalfVec rounded(Vec x, Float16) {
#if defined(__AVX512F__)
  return (HalfVec)_mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
  return (HalfVec)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__aarch64__)
  return (HalfVec)vcvt_f16_f32((float32x4_t)x);
#else
  const BitsVec bits = (BitsVec)x, size = bits & 0x7fffffff;
  constexpr std::uint32_t kBias = (127 - 15) << 23, kSmallest = kBias + (1 << 23);
  const BitsVec normal = (size - kBias + 0xfff + (size >> 13 & 1)) >> 13;
  // Added to 1/2, whose last bit is worth the smallest half: float32's own rounding does it.
  const BitsVec half = BitsVec{} + (126u << 23);
  const BitsVec subnormal = (BitsVec)((Vec)size + (Vec)half) - half;
  const BitsVec number = size < kSmallest ? subnormal : normal;
  const BitsVec infinite = BitsVec{} + 0x7c00, nan = 0x7e00 | (size >> 13 & 0x1ff);
  const BitsVec beyond = size > 0x7f800000 ? nan : infinite;
  return __builtin_convertvector((bits >> 16 & 0x8000) | (size >= 0x47800000 ? beyond : number),
                                 HalfVec);
#endif
}

// Two neighbours a lane, as they lie in memory, and the float32 of each.
FORGE_INLINE Vec load_pairs(const BFloat16* from) {
  Vec pairs;
  std::memcpy(&pairs, from, sizeof pairs);
  return pairs;
}
FORGE_INLINE Vec even_of_pairs(Vec pairs) { return (Vec)((BitsVec)pairs << 16); }
FORGE_INLINE Vec odd_of_pairs(Vec pairs) { return (Vec)((BitsVec)pairs & 0xffff0000u); }

// Two vectors of neighbours become the even and the odd ones, and again what they were.
FORGE_INLINE void split_pairs(Vec& a, Vec& b) {
#if defined(__AVX512F__)
  const Vec even =
      __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  b = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif defined(__AVX2__)
  const Vec even = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
  b = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
  const Vec even = __builtin_shufflevector(a, b, 0, 2, 4, 6);
  b = __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
  a = even;
}
FORGE_INLINE void join_pairs(Vec& even, Vec& odd) {
#if defined(__AVX512F__)
  const Vec low =
      __builtin_shufflevector(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  odd = __builtin_shufflevector(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                31);
#elif defined(__AVX2__)
  const Vec low = __builtin_shufflevector(even, odd, 0, 8, 1, 9, 2, 10, 3, 11);
  odd = __builtin_shufflevector(even, odd, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  const Vec low = __builtin_shufflevector(even, odd, 0, 4, 1, 5);
  odd = __builtin_shufflevector(even, odd, 2, 6, 3, 7);
#endif
  even = low;
}

template <typename Half>
FORGE_INLINE Vec load_half(const Half* from) {
  HalfVec bits;
  std::memcpy(&bits, from, sizeof bits);
  return widened(bits, Half{});
}

template <typename Half>
FORGE_INLINE void store_half(Half* to, Vec x) {
  const HalfVec bits = rounded(x, Half{});
  std::memcpy(to, &bits, sizeof bits);
}

template <typename Half>
FORGE_INLINE Vec load_half_quads(const Half* const* rows, std::int64_t at) {
  std::uint64_t quads[kLanes / 4];
  FORGE_UNROLL
  for (int i = 0; i < kLanes / 4; ++i) std::memcpy(&quads[i], rows[4 * i] + at, sizeof quads[i]);
  HalfVec bits;
  std::memcpy(&bits, quads, sizeof bits);
  return widened(bits, Half{});
}

template <typename Half>
FORGE_INLINE Vec load_half_partial(const Half* from, int n) {
#if defined(__AVX512F__)
  const auto mask = static_cast<__mmask16>((1u << n) - 1u);
  return widened((HalfVec)_mm256_maskz_loadu_epi16(mask, from), Half{});
#else
  HalfVec bits{};
  for (int lane = 0; lane < n; ++lane) bits[lane] = from[lane].bits;
  return widened(bits, Half{});
#endif
}

template <typename Half>
FORGE_INLINE void store_half_partial(Half* to, Vec x, int n) {
  const HalfVec bits = rounded(x, Half{});
#if defined(__AVX512F__)
  _mm256_mask_storeu_epi16(to, static_cast<__mmask16>((1u << n) - 1u), (__m256i)bits);
#else
  for (int lane = 0; lane < n; ++lane) to[lane].bits = bits[lane];
#endif
}

#define FORGE_STORED_AS(Half)                                                                   \
  FORGE_INLINE Vec load(const Half* from) { return load_half(from); }                           \
  FORGE_INLINE void store(Half* to, Vec x) { store_half(to, x); }                               \
  FORGE_INLINE Vec load_quads(const Half* const* rows, std::int64_t at) {                       \
    return load_half_quads(rows, at);                                                           \
  }                                                                                             \
  FORGE_INLINE Vec load_partial(const Half* from, int n) { return load_half_partial(from, n); } \
  FORGE_INLINE void store_partial(Half* to, Vec x, int n) { store_half_partial(to, x, n); }
FORGE_STORED_AS(Float16)
FORGE_STORED_AS(BFloat16)
#undef FORGE_STORED_AS

// An element of a mask, as what it adds to a score: 0 where the pair is visible, else -inf.
struct Shown {
  std::uint8_t byte;
};
typedef std::uint8_t ByteVec __attribute__((vector_size(kLanes)));

FORGE_INLINE Vec widened(ByteVec bytes) {
#if defined(__AVX512F__)
  const __mmask16 hidden = _mm_testn_epi8_mask((__m128i)bytes, (__m128i)bytes);
  return (Vec)_mm512_maskz_mov_ps(hidden, _mm512_set1_ps(-__builtin_inff()));
#else
#if defined(__AVX2__)
  std::int64_t eight;
  std::memcpy(&eight, &bytes, sizeof eight);
  const IntVec wide = (IntVec)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(eight));
#else
  std::uint32_t four;
  std::memcpy(&four, &bytes, sizeof four);
  const IntVec wide = (IntVec)((BitsVec{} + four) & BitsVec{0xff, 0xff00, 0xff0000, 0xff000000});
#endif
  return from_bits((wide == 0) & bits_of(broadcast(-__builtin_inff())));
#endif
}

FORGE_INLINE Vec load(const Shown* from) {
  ByteVec bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return widened(bytes);
}

FORGE_INLINE Vec load_quads(const Shown* const* rows, std::int64_t at) {
  std::uint32_t quads[kLanes / 4];
  FORGE_UNROLL
  for (int i = 0; i < kLanes / 4; ++i) std::memcpy(&quads[i], rows[4 * i] + at, sizeof quads[i]);
  ByteVec bytes;
  std::memcpy(&bytes, quads, sizeof bytes);
  return widened(bytes);
}

FORGE_INLINE Vec load_partial(const Shown* from, int n) {
  ByteVec bytes = ByteVec{} + 1;
  for (int lane = 0; lane < n; ++lane) bytes[lane] = from[lane].byte;
  return widened(bytes);
}

// body(pointer) with the operand's own element type, which is const where `body` takes it so.
template <typename Body>
FORGE_INLINE auto with_elements(const Operand& operand, const Body& body) {
  if (operand.dtype == DType::kFloat16) return body(static_cast<Float16*>(operand.data));
  if (operand.dtype == DType::kBFloat16) return body(static_cast<BFloat16*>(operand.data));
  return body(static_cast<Real*>(operand.data));
}

// The elements of an operand of the same type.
template <typename Stored>
FORGE_INLINE const Stored* elements_like(const Stored*, const Operand& operand) {
  return static_cast<const Stored*>(operand.data);
}

// One vector of a row of n elements that starts at element `at`: whole, partial, or zeros past it.
template <typename Stored>
FORGE_INLINE Vec load_within(const Stored* row, std::int64_t at, std::int64_t n) {
  if (at + kLanes <= n) return load(row + at);
  return at < n ? load_partial(row + at, static_cast<int>(n - at)) : Vec{};
}

template <typename Stored>
FORGE_INLINE Real element_at(const Stored* from) {
  return load_partial(from, 1)[0];
}

template <typename Stored>
FORGE_INLINE void store_within(Stored* row, std::int64_t at, std::int64_t n, Vec x) {
  if (at + kLanes <= n) {
    store(row + at, x);
  } else if (at < n) {
    store_partial(row + at, x, static_cast<int>(n - at));
  }
}

}  // namespace
}  // namespace forge::cpu::FORGE_TARGET
