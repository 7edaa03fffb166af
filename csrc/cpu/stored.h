// The arrays' elements on their way into vectors and back: what packing and decode read, and what
// the results are written with. They are templates over the stored type and know no more of it than
// the overloads here: load and store (of float32 in simd.h), load_quads, load_partial,
// store_partial. All that lies between is float32.
#pragma once

#include "cpu/simd.h"

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

// One vector of a row of n elements that starts at element `at`: whole, partial, or zeros past it.
template <typename Stored>
FORGE_INLINE Vec load_within(const Stored* row, std::int64_t at, std::int64_t n) {
  if (at + kLanes <= n) return load(row + at);
  return at < n ? load_partial(row + at, static_cast<int>(n - at)) : Vec{};
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
