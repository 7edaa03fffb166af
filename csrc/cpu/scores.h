// The scores. Forward, decode and every backward sweep get s_ij from here, which is why it is the
// same float in all of them: one fma chain over d, ascending, from zero; times scale; then the
// softcap. Only decode's score_keys, which has its keys in registers, runs that chain itself. Edges
// and tails change how many chains run side by side, never a chain.
#pragma once

#include "cpu/simd_math.h"

namespace forge::cpu::FORGE_TARGET {
namespace {

// acc[r][c] = chain over d of row(r)[d] * lanes[d][c * kLanes ...]: Rows rows against Vecs vectors
// of a panel that holds its vectors d by d, `lane_stride` elements apart. Which side is the query
// is the caller's choice; the product of two floats does not mind.
template <int Rows, int Vecs, typename RowAt>
FORGE_INLINE void dot_chains(const RowAt& row_at, const Real* lanes, Int64 lane_stride, Int64 hd,
                             Vec (&acc)[Rows][Vecs]) {
  FORGE_UNROLL
  for (int r = 0; r < Rows; ++r) {
    FORGE_UNROLL
    for (int c = 0; c < Vecs; ++c) acc[r][c] = Vec{};
  }
  for (Int64 d = 0; d < hd; ++d) {
    Vec lane[Vecs];
    FORGE_UNROLL
    for (int c = 0; c < Vecs; ++c) lane[c] = load(lanes + d * lane_stride + c * kLanes);
    FORGE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      const Vec row = broadcast(row_at(r)[d]);
      FORGE_UNROLL
      for (int c = 0; c < Vecs; ++c) acc[r][c] = fma(row, lane[c], acc[r][c]);
    }
  }
}

// Without fma a chain rounds twice a step, and large logits would be less exact than those of other
// float32 code: there the chain runs in double, where products are exact, and is rounded once.
template <int Rows, int Vecs, typename RowAt>
FORGE_INLINE void wide_dot_chains(const RowAt& row_at, const Real* lanes, Int64 lane_stride,
                                  Int64 hd, Vec (&acc)[Rows][Vecs]) {
  typedef double WideVec __attribute__((vector_size(2 * kVecBytes)));
  FORGE_UNROLL
  for (int c = 0; c < Vecs; ++c) {
    WideVec sum[Rows];
    FORGE_UNROLL
    for (int r = 0; r < Rows; ++r) sum[r] = WideVec{};
    for (Int64 d = 0; d < hd; ++d) {
      const WideVec lane =
          __builtin_convertvector(load(lanes + d * lane_stride + c * kLanes), WideVec);
      FORGE_UNROLL
      for (int r = 0; r < Rows; ++r) sum[r] += lane * static_cast<double>(row_at(r)[d]);
    }
    FORGE_UNROLL
    for (int r = 0; r < Rows; ++r) acc[r][c] = __builtin_convertvector(sum[r], Vec);
  }
}

// Rows of `row_stride` elements.
template <int Rows, int Vecs>
FORGE_INLINE void dot_rows(const Real* rows, Int64 row_stride, const Real* lanes, Int64 lane_stride,
                           Int64 hd, Vec (&acc)[Rows][Vecs]) {
  const auto row_at = [=](int r) __attribute__((always_inline)) { return rows + r * row_stride; };
  if constexpr (kHasFma) {
    dot_chains(row_at, lanes, lane_stride, hd, acc);
  } else {
    wide_dot_chains(row_at, lanes, lane_stride, hd, acc);
  }
}

// Rows at any places.
template <int Rows, int Vecs>
FORGE_INLINE void dot_rows(const Real* const* rows, const Real* lanes, Int64 lane_stride, Int64 hd,
                           Vec (&acc)[Rows][Vecs]) {
  const auto row_at = [=](int r) __attribute__((always_inline)) { return rows[r]; };
  if constexpr (kHasFma) {
    dot_chains(row_at, lanes, lane_stride, hd, acc);
  } else {
    wide_dot_chains(row_at, lanes, lane_stride, hd, acc);
  }
}

// From the dot product to the score.
struct ScoreMap {
  Real scale;
  Real softcap;          // 0: off
  Real inverse_softcap;  // finite
};

FORGE_INLINE ScoreMap score_map(Real scale, Real softcap) {
  ScoreMap map;
  map.scale = scale;
  map.softcap = softcap;
  map.inverse_softcap = softcap > 0 ? 1 / softcap : 0;
  // 1 / softcap overflows below 2^-128; then no two scores differ by more than exp can tell from 0.
  if (map.inverse_softcap > 3.40282347e38f) map.inverse_softcap = 3.40282347e38f;
  return map;
}

// tanh_x, only with Capped: tanh(x / softcap), for the backward's factor 1 - tanh_x^2.
template <bool Capped>
FORGE_INLINE Vec score_of(Vec dot, const ScoreMap& map, Vec& tanh_x) {
  const Vec x = dot * broadcast(map.scale);
  if (!Capped) return x;
  tanh_x = tanh(x * broadcast(map.inverse_softcap));
  return broadcast(map.softcap) * tanh_x;
}

template <bool Capped>
FORGE_INLINE Vec score_of(Vec dot, const ScoreMap& map) {
  Vec unused;
  return score_of<Capped>(dot, map, unused);
}

}  // namespace
}  // namespace forge::cpu::FORGE_TARGET
