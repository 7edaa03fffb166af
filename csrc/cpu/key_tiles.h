// How the forward takes keys, in tiles and in lanes alike, so that a row's bits tell nothing of who
// computed it or of what else was computed:
//   - Keys are cut at multiples of the tile length, which the head size and the target decide.
//   - A tile gives a part: m, the largest score; l, the sum of p = exp(s - m); and for each channel
//     the sum of p v, a chain from zero over ascending keys.
//   - l is summed in four chains, one for each residue of the key by four, added up crosswise.
//   - The parts are merged one after the other, by ascending keys, whoever made them.
// Keys that a row does not see have a p of zero and change nothing, so it does not matter which of
// them were at hand. Only the sign of a zero can tell: a row ends with +0 (finished, below).
#pragma once

#include "cpu/simd_math.h"
#include "shared/attn_row.h"
#include "shared/index_range.h"

namespace forge::cpu::FORGE_TARGET {
namespace {

constexpr int kKeyClasses = 4;
// Tiles hold whole steps of the forward (6 keys with 16 registers, 8 with 32) and of decode (16).
constexpr int kTileUnit = kVectorRegisters == 32 ? 16 : 48;
constexpr int kMostTileKeys = (128 + kTileUnit - 1) / kTileUnit * kTileUnit;

// Keys a tile, by the larger of the head sizes: scores of a row block stay in L1, packed keys and
// values in L2.
FORGE_INLINE Int64 tile_keys(Int64 widest) { return round_up(widest <= 128 ? 128 : 64, kTileUnit); }

// Down to the first of four keys: where a range of keys may begin.
FORGE_INLINE Int64 class_begin(Int64 key) { return key / kKeyClasses * kKeyClasses; }

// A finite number to subtract from scores whose maximum is m: of nothing but -inf it makes p = 0,
// where -inf - -inf would be NaN.
FORGE_INLINE Vec base_of(Vec m) { return select(m == broadcast(-__builtin_inff()), Vec{}, m); }

// What happens to sums when a part comes to them: both are brought to the larger maximum.
struct Merge {
  Vec m;
  Vec alpha;  // factor of the sums so far
  Vec beta;   // and of the part's

  FORGE_MEMBER Vec operator()(Vec sum, Vec part) const { return fma(sum, alpha, part * beta); }
};

FORGE_INLINE Merge merge_maxima(Vec before, Vec part) {
  Merge merge;
  merge.m = max(part, before);
  const Vec base = base_of(merge.m);
  merge.alpha = exp_of_nonpositive(before - base);
  merge.beta = exp_of_nonpositive(part - base);
  return merge;
}

// A row's end, and the factor of its sums. Of zeros of both signs, which one is the maximum depends
// on the order that lanes are compared in: here it is +0. Sums are to be multiplied as in
// finished_sum.
struct RowEnd {
  AttnRow<Real> row;
  Real factor;
};

// The sink is one more score, with a value of zero; -inf: there is none.
FORGE_INLINE RowEnd end_of_row(bool sees_keys, Real m, Real l, Real sink) {
  RowEnd end = {finished_row(sees_keys, m, l), 0};
  end.row.m += 0;
  end.factor = 1 / end.row.l;
  if (sink == -__builtin_inff()) return end;
  if (!end.row.live) {
    end.row.m = sink;
    end.row.l = 1;
    return end;
  }
  end.row.m = (m > sink ? m : sink) + 0;
  Vec below{};
  below[0] = m - end.row.m;
  below[1] = sink - end.row.m;
  const Vec factors = exp_of_nonpositive(below);
  end.row.l = l * factors[0] + factors[1];
  end.factor = factors[0] / end.row.l;
  return end;
}

FORGE_INLINE Vec finished_sum(Vec sum, Vec factor) { return fma(sum, factor, Vec{}); }

}  // namespace
}  // namespace forge::cpu::FORGE_TARGET
