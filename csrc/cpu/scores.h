// The scores. Forward, decode and every backward sweep get s_ij from here, which is why it is the
// same float in all of them: fma chains over kChainChannels of d each, ascending, from zero, added
// up in their order; then the score map. Edges and tails change how many chains run side by side,
// never a chain.
#pragma once

#include "cpu/simd_math.h"

namespace forge::cpu::FORGE_TARGET {
namespace {

// One step of a chain.
FORGE_INLINE Vec chain_step(Vec row, Vec lane, Vec sum) { return fma(row, lane, sum); }

// Channels of a chain: a longer one would gather more error than scores may have. The chains of a
// larger head size are added up in their order.
constexpr Int64 kChainChannels = 64;

// acc[r][c] = a chain over channels [at.begin, at.end).
template <int Rows, int Vecs, typename RowAt>
FORGE_INLINE void one_chain(const RowAt& row_at, const Real* lanes, Int64 lane_stride,
                            IndexRange at, Vec (&acc)[Rows][Vecs]) {
  FORGE_UNROLL
  for (int r = 0; r < Rows; ++r) {
    FORGE_UNROLL
    for (int c = 0; c < Vecs; ++c) acc[r][c] = Vec{};
  }
  for (Int64 d = at.begin; d < at.end; ++d) {
    Vec lane[Vecs];
    FORGE_UNROLL
    for (int c = 0; c < Vecs; ++c) lane[c] = load(lanes + d * lane_stride + c * kLanes);
    FORGE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      const Vec row = broadcast(row_at(r)[d]);
      FORGE_UNROLL
      for (int c = 0; c < Vecs; ++c) acc[r][c] = chain_step(row, lane[c], acc[r][c]);
    }
  }
}

// acc[r][c] = chains over d of row(r)[d] * lanes[d][c * kLanes ...]: Rows rows against Vecs vectors
// of a panel that holds its vectors d by d, `lane_stride` elements apart. Which side is the query
// is the caller's choice; the product of two floats does not mind.
template <int Rows, int Vecs, typename RowAt>
FORGE_INLINE void dot_chains(const RowAt& row_at, const Real* lanes, Int64 lane_stride, Int64 hd,
                             Vec (&acc)[Rows][Vecs]) {
  // Of the chains so far. Not vectors: their alignment would cost the loops below a register.
  Real before[Rows * Vecs * kLanes];
  for (Int64 begin = 0;; begin += kChainChannels) {
    const Int64 end = smaller(hd, begin + kChainChannels);
    one_chain(row_at, lanes, lane_stride, {begin, end}, acc);
    FORGE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      FORGE_UNROLL
      for (int c = 0; c < Vecs; ++c) {
        Real* sum = before + (r * Vecs + c) * kLanes;
        if (begin > 0) acc[r][c] = load(sum) + acc[r][c];
        if (end < hd) store(sum, acc[r][c]);
      }
    }
    if (end == hd) return;
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

// What happens to a score between the dot product and the maximum. A map has
//   score(dot, at)         the score; `at`: where its vector lies among the tile's scores
//   score(dot, at, slope)  likewise, and its derivative by scale * dot where kHasSlope
struct ScaledMap {
  static constexpr bool kHasSlope = false;
  Real scale;

  FORGE_MEMBER Vec score(Vec dot, Int64) const { return dot * broadcast(scale); }
  FORGE_MEMBER Vec score(Vec dot, Int64 at, Vec&) const { return score(dot, at); }
};

struct CappedMap {
  static constexpr bool kHasSlope = true;
  Real scale;
  Real softcap;
  Real inverse_softcap;  // finite

  FORGE_MEMBER Vec tanh_of(Vec dot) const {
    return tanh(dot * broadcast(scale) * broadcast(inverse_softcap));
  }
  FORGE_MEMBER Vec score(Vec dot, Int64) const { return broadcast(softcap) * tanh_of(dot); }
  FORGE_MEMBER Vec score(Vec dot, Int64, Vec& slope) const {
    const Vec t = tanh_of(dot);
    slope = broadcast(1) - t * t;
    return broadcast(softcap) * t;
  }
};

// Whether a bias hides its pair, whatever the score is. NaN does not.
FORGE_INLINE IntVec hides(Vec bias) { return bias == broadcast(-__builtin_inff()); }

FORGE_INLINE Vec add_bias(Vec score, Vec bias) { return select(hides(bias), bias, score + bias); }

// Another map, then a bias, which lies as the tile's scores do.
template <typename Map>
struct BiasedMap {
  static constexpr bool kHasSlope = Map::kHasSlope;
  Map map;
  const Real* bias;

  FORGE_MEMBER Vec score(Vec dot, Int64 at) const {
    return add_bias(map.score(dot, at), load(bias + at));
  }
  FORGE_MEMBER Vec score(Vec dot, Int64 at, Vec& slope) const {
    return add_bias(map.score(dot, at, slope), load(bias + at));
  }
};

// body(map) with the map of a call: chosen here, once, so that the loops below do not ask.
template <typename Body>
FORGE_INLINE void with_score_map(const AttnParams& params, const Body& body) {
  if (!(params.softcap > 0)) return body(ScaledMap{params.scale});
  // 1 / softcap overflows below 2^-128; then no two scores differ by more than exp can tell from 0.
  const Real inverse = 1 / params.softcap, largest = 3.40282347e38f;
  body(CappedMap{params.scale, params.softcap, inverse > largest ? largest : inverse});
}

// body(map) with the map of a tile that has a bias; null: it has none.
template <typename Map, typename Body>
FORGE_INLINE void with_bias(const Map& map, const Real* bias, const Body& body) {
  if (bias == nullptr) return body(map);
  body(BiasedMap<Map>{map, bias});
}

}  // namespace
}  // namespace forge::cpu::FORGE_TARGET
