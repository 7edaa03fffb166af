// The forward's register tiles: kRowBlock rows of the problem lie in vector lanes, keys and
// channels are broadcast. So the row maximum, the row sum and the rescaling are plain vector
// operations, and any number of keys and channels works without padding the arrays.
#pragma once

#include "cpu/key_tiles.h"
#include "cpu/scores.h"

namespace forge::cpu::FORGE_TARGET {
namespace {

constexpr int kRowVecs = 2;
constexpr int kRowBlock = kRowVecs * kLanes;
// Accumulators kStep x kRowVecs, one vector of each row operand, one broadcast: 15 of 16 registers,
// or 19 of 32.
constexpr int kStep = kVectorRegisters == 32 ? 8 : 6;
static_assert(kTileUnit % kStep == 0 && kStep >= kKeyClasses);

// The keys [from, to) of the tile that a row block works on; from is the first of a class. In
// [full_from, full_to) every row sees every key; elsewhere row lane sees seen_from[lane] <= key <
// seen_to[lane].
struct KeySpan {
  int from;
  int to;
  int full_from;
  int full_to;
  IntVec seen_from[kRowVecs];
  IntVec seen_to[kRowVecs];
};

FORGE_INLINE IntVec sees(const KeySpan& span, int key, int c) {
  const IntVec at = broadcast_int(key);
  return (at >= span.seen_from[c]) & (at < span.seen_to[c]);
}

// One row block: its state and its operands.
struct RowBlock {
  const Real* q;     // [hd][kRowBlock]
  Real* o;           // [hv][kRowBlock], the running sum of p v
  Real* m;           // [kRowBlock]
  Real* l;           // [kRowBlock]
  bool fresh;        // nothing added yet: o holds nothing
  const Real* bias;  // of the tile's pairs (bias.h), laid as the scores; null: none
};

// Packed keys and values of the tile.
struct KeyTile {
  const Real* k;  // [keys][k_stride], with kStep - 1 readable rows past the last
  Int64 k_stride;
  const Real* v;  // panels of kStep channels, [keys][kStep] each
  Int64 v_panel;  // elements from panel to panel
  bool v_finite;
};

// scores[key][row] of the span, -inf where not visible; largest: the maximum of each row.
template <typename Map>
FORGE_NOINLINE void score_span(const RowBlock& block, const KeyTile& tile, Int64 hd, const Map& map,
                               const KeySpan& span, Real* scores, Vec (&largest)[kRowVecs]) {
  Vec top[kRowVecs];
  FORGE_UNROLL
  for (int c = 0; c < kRowVecs; ++c) top[c] = broadcast(-__builtin_inff());
  for (int key = span.from; key < span.to; key += kStep) {
    Vec acc[kStep][kRowVecs];
    dot_rows(tile.k + key * tile.k_stride, tile.k_stride, block.q, kRowBlock, hd, acc);
    Real* to = scores + key * kRowBlock;
    const bool whole = key >= span.full_from && key + kStep <= span.full_to;
    const auto map_and_store = [&](int r, int c, bool masked) __attribute__((always_inline)) {
      Vec s = map.score(acc[r][c], (key + r) * kRowBlock + c * kLanes);
      if (masked) s = select(sees(span, key + r, c), s, broadcast(-__builtin_inff()));
      store(to + r * kRowBlock + c * kLanes, s);
      top[c] = max(s, top[c]);
    };
    if (whole) {
      FORGE_UNROLL
      for (int r = 0; r < kStep; ++r) {
        FORGE_UNROLL
        for (int c = 0; c < kRowVecs; ++c) map_and_store(r, c, false);
      }
    } else {  // the edge of the mask or of the tile
      FORGE_UNROLL
      for (int r = 0; r < kStep; ++r) {
        FORGE_UNROLL
        for (int c = 0; c < kRowVecs; ++c) map_and_store(r, c, true);
      }
    }
  }
  FORGE_UNROLL
  for (int c = 0; c < kRowVecs; ++c) largest[c] = top[c];
}

// Scores become p = exp(s - largest); m and l move on. merge: how the values do.
FORGE_NOINLINE void softmax_span(const RowBlock& block, const KeySpan& span, Real* scores,
                                 const Vec (&largest)[kRowVecs], Merge (&merge)[kRowVecs]) {
  FORGE_UNROLL
  for (int c = 0; c < kRowVecs; ++c) {
    const Vec base = base_of(largest[c]);
    Vec sum[kKeyClasses] = {};
    const auto add = [&](int key, int r) __attribute__((always_inline)) {
      Real* at = scores + (key + r) * kRowBlock + c * kLanes;
      const Vec p = exp_of_nonpositive(load(at) - base);
      store(at, p);
      sum[r] = sum[r] + p;
    };
    int key = span.from;
    for (; key + kKeyClasses <= span.to; key += kKeyClasses) {
      FORGE_UNROLL
      for (int r = 0; r < kKeyClasses; ++r) add(key, r);
    }
    FORGE_UNROLL
    for (int r = 0; r < kKeyClasses; ++r) {
      if (key + r < span.to) add(key, r);
    }
    Real *m = block.m + c * kLanes, *l = block.l + c * kLanes;
    merge[c] = merge_maxima(load(m), largest[c]);
    store(m, merge[c].m);
    store(l, merge[c](load(l), (sum[0] + sum[2]) + (sum[1] + sum[3])));
  }
}

// Merges o with the sums over the span's keys of p v, for Channels channels of one panel.
template <int Channels>
FORGE_INLINE void add_values(const Real* p, const Real* v, int keys, const Merge (&merge)[kRowVecs],
                             bool fresh, Real* o) {
  Vec acc[Channels][kRowVecs];
  FORGE_UNROLL
  for (int r = 0; r < Channels; ++r) {
    FORGE_UNROLL
    for (int c = 0; c < kRowVecs; ++c) acc[r][c] = Vec{};
  }
  for (int key = 0; key < keys; ++key) {
    Vec lane[kRowVecs];
    FORGE_UNROLL
    for (int c = 0; c < kRowVecs; ++c) lane[c] = load(p + key * kRowBlock + c * kLanes);
    FORGE_UNROLL
    for (int r = 0; r < Channels; ++r) {
      const Vec value = broadcast(v[key * kStep + r]);
      FORGE_UNROLL
      for (int c = 0; c < kRowVecs; ++c) acc[r][c] = fma(value, lane[c], acc[r][c]);
    }
  }
  FORGE_UNROLL
  for (int r = 0; r < Channels; ++r) {
    FORGE_UNROLL
    for (int c = 0; c < kRowVecs; ++c) {
      Real* at = o + r * kRowBlock + c * kLanes;
      store(at, fresh ? acc[r][c] : merge[c](load(at), acc[r][c]));
    }
  }
}

// The last panel of a head size that is no multiple of kStep.
template <int Channels>
FORGE_INLINE void add_last_values(int channels, const Real* p, const Real* v, int keys,
                                  const Merge (&merge)[kRowVecs], bool fresh, Real* o) {
  if (channels == Channels) {
    add_values<Channels>(p, v, keys, merge, fresh, o);
  } else if constexpr (Channels > 1) {
    add_last_values<Channels - 1>(channels, p, v, keys, merge, fresh, o);
  }
}

// The same with a select a step, for a tile whose values hold NaN or infinity and that hides some
// pairs: 0 * NaN would reach rows that do not see it. The same chains, so the same bits elsewhere.
FORGE_NOINLINE void add_visible_values(const RowBlock& block, const KeyTile& tile,
                                       const KeySpan& span, Int64 hv, const Real* scores,
                                       const Merge (&merge)[kRowVecs]) {
  for (Int64 channel = 0; channel < hv; ++channel) {
    const Real* v = tile.v + channel / kStep * tile.v_panel + channel % kStep;
    for (int c = 0; c < kRowVecs; ++c) {
      Vec acc{};
      for (int key = span.from; key < span.to; ++key) {
        const Int64 pair = key * kRowBlock + c * kLanes;
        IntVec seen = sees(span, key, c);
        if (block.bias) seen &= ~hides(load(block.bias + pair));
        acc = select(seen, fma(broadcast(v[key * kStep]), load(scores + pair), acc), acc);
      }
      Real* at = block.o + channel * kRowBlock + c * kLanes;
      store(at, block.fresh ? acc : merge[c](load(at), acc));
    }
  }
}

FORGE_NOINLINE void add_all_values(const RowBlock& block, const KeyTile& tile, const KeySpan& span,
                                   Int64 hv, const Real* scores, const Merge (&merge)[kRowVecs]) {
  const Real* p = scores + span.from * kRowBlock;
  const Real* v = tile.v + span.from * kStep;
  const int keys = span.to - span.from;
  Real* o = block.o;
  Int64 channel = 0;
  for (; channel + kStep <= hv; channel += kStep, v += tile.v_panel, o += kStep * kRowBlock) {
    add_values<kStep>(p, v, keys, merge, block.fresh, o);
  }
  if (channel < hv) {
    add_last_values<kStep - 1>(static_cast<int>(hv - channel), p, v, keys, merge, block.fresh, o);
  }
}

// One row block against one key tile.
template <typename Map>
FORGE_INLINE void add_tile(const RowBlock& block, const KeyTile& tile, const KeySpan& span,
                           const AttnParams& params, const Map& map, Real* scores) {
  const Int64 hv = params.hv;
  Vec largest[kRowVecs];
  Merge merge[kRowVecs];
  with_bias(map, block.bias, [&](const auto& biased) {
    score_span(block, tile, params.hd, biased, span, scores, largest);
  });
  softmax_span(block, span, scores, largest, merge);
  const bool whole = span.from >= span.full_from && span.to <= span.full_to && !block.bias;
  if (whole || tile.v_finite) {
    add_all_values(block, tile, span, hv, scores, merge);
  } else {
    add_visible_values(block, tile, span, hv, scores, merge);
  }
}

}  // namespace
}  // namespace forge::cpu::FORGE_TARGET
