// The inner loops of decode: a few rows of one or two kv heads against some keys.
#pragma once

#include <type_traits>

#include "cpu/forward/kernel.h"
#include "cpu/key_tiles.h"
#include "cpu/pack.h"
#include "cpu/scores.h"

namespace forge::cpu::FORGE_TARGET {
namespace {

constexpr int kPanelVecs = 16 / kLanes;
constexpr int kPanelKeys = kPanelVecs * kLanes;  // keys read abreast
static_assert(kTileUnit % kPanelKeys == 0);
// Whether registers hold a block of keys and the sums.
constexpr bool kKeysInRegisters = kLanes == 16 && kVectorRegisters >= 32;
constexpr int kValueKeys = 16;  // values read abreast
constexpr int kRowsAtOnce = 4;

// Rows of keys or values.
template <typename Stored>
struct KeyBlock {
  const Stored* first;
  Int64 stride;  // from key to key
  Int64 head_stride;
  int count;
};

template <typename Stored>
FORGE_INLINE void prefetch_rows(const Stored* first, Int64 stride, int count, Int64 n) {
  constexpr Int64 kLine = 64 / sizeof(Stored);
  for (int row = 0; row < count; ++row) {
    for (Int64 d = 0; d < n; d += kLine) __builtin_prefetch(first + row * stride + d, 0, 3);
  }
}

// The share of head `head` of `heads` in prefetching rows, from head 0's first on: in the memory's
// order where the heads of a row lie side by side.
template <typename Stored>
FORGE_INLINE void prefetch_share(const KeyBlock<Stored>& rows, int head, int heads, Int64 hd) {
  if (rows.head_stride == hd) {
    const int from = rows.count * head / heads, to = rows.count * (head + 1) / heads;
    prefetch_rows(rows.first + from * rows.stride, rows.stride, to - from, heads * hd);
  } else {
    prefetch_rows(rows.first + head * rows.head_stride, rows.stride, rows.count, hd);
  }
}

// The rows [key, key + step), as many as there are, from `head` on.
template <typename Stored>
FORGE_INLINE KeyBlock<Stored> rows_from(const KeyBlock<Stored>& block, Int64 head, int key,
                                        int step) {
  return {block.first + head * block.head_stride + key * block.stride, block.stride,
          block.head_stride, static_cast<int>(larger(0, smaller(step, block.count - key)))};
}

// scores[r][key] for the keys of a panel: hd times kPanelKeys, keys in lanes. `place`: of the first
// row and key.
template <int Rows, typename Map>
FORGE_NOINLINE void score_panel(const Real* const* q, const Real* panel, Int64 hd, const Map& map,
                                PairPlace place, Real* scores) {
  // As many vectors side by side as keep both the chains' latency hidden and their sums in
  // registers.
  constexpr int kVecs = Rows <= 2 || kPanelVecs < 2 ? kPanelVecs : 2;
  for (int c = 0; c < kPanelVecs; c += kVecs) {
    Vec acc[Rows][kVecs];
    dot_rows(q, panel + c * kLanes, kPanelKeys, hd, acc);
    FORGE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      FORGE_UNROLL
      for (int i = 0; i < kVecs; ++i) {
        const PairPlace at = {place.row + r, place.key + (c + i) * kLanes};
        store(scores + r * kMostTileKeys + (c + i) * kLanes, map.score(acc[r][i], at));
      }
    }
  }
}

// What the chains gave up to channel d is put by, and new ones begin.
template <int N>
FORGE_INLINE void next_chain(Int64 d, Vec (&acc)[N], Vec (&before)[N]) {
  FORGE_UNROLL
  for (int n = 0; n < N; ++n) {
    before[n] = d == kChainChannels ? acc[n] : before[n] + acc[n];
    acc[n] = Vec{};
  }
}

// A vector of each of kLanes rows, transposed.
template <typename Load>
FORGE_INLINE void load_transposed(Vec (&block)[kLanes], const Load& load_row) {
  FORGE_UNROLL
  for (int i = 0; i < kLanes; i += 4) {  // by four: what is loaded stays in registers
    FORGE_UNROLL
    for (int j = i; j < i + 4; ++j) block[j] = load_row(j);
    transpose_quads(block[i], block[i + 1], block[i + 2], block[i + 3]);
  }
  transpose_parts(block);
}

// The same straight from rows of keys, kLanes of them, that are transposed in registers: each line
// of memory is loaded once, whole. Heads: kv heads side by side, so that several chains run even
// with one row a head.
template <int Heads, int Rows, typename Map, typename Stored>
FORGE_NOINLINE void score_keys(const Real* const* q, const KeyBlock<Stored>& k, Int64 hd,
                               const Map& map, PairPlace place, Real* scores) {
  Vec acc[Heads * Rows] = {}, before[Heads * Rows] = {};
  Int64 d = 0;
  if constexpr (std::is_same_v<Stored, BFloat16>) {
    // Two channels a lane: half as many lanes to transpose.
    for (; d + 2 * kLanes <= hd; d += 2 * kLanes) {
      if (d > 0 && d % kChainChannels == 0) next_chain(d, acc, before);
      FORGE_UNROLL
      for (int head = 0; head < Heads; ++head) {
        Vec block[kLanes];
        const Stored* first = k.first + head * k.head_stride + d;
        load_transposed(block, [&](int row) __attribute__((always_inline)) {
          return load_pairs(first + row * k.stride);
        });
        FORGE_UNROLL
        for (int i = 0; i < kLanes; ++i) {
          const Vec even = even_of_pairs(block[i]), odd = odd_of_pairs(block[i]);
          FORGE_UNROLL
          for (int r = head * Rows; r < (head + 1) * Rows; ++r) {
            acc[r] = chain_step(broadcast(q[r][d + 2 * i]), even, acc[r]);
            acc[r] = chain_step(broadcast(q[r][d + 2 * i + 1]), odd, acc[r]);
          }
        }
      }
    }
  }
  for (; d + kLanes <= hd; d += kLanes) {
    if (d > 0 && d % kChainChannels == 0) next_chain(d, acc, before);
    FORGE_UNROLL
    for (int head = 0; head < Heads; ++head) {
      Vec block[kLanes];
      const Stored* first = k.first + head * k.head_stride + d;
      load_transposed(block, [&](int row) __attribute__((always_inline)) {
        return load(first + row * k.stride);
      });
      FORGE_UNROLL
      for (int i = 0; i < kLanes; ++i) {
        FORGE_UNROLL
        for (int r = head * Rows; r < (head + 1) * Rows; ++r) {
          acc[r] = chain_step(broadcast(q[r][d + i]), block[i], acc[r]);
        }
      }
    }
  }
  if (d < hd) {
    if (d > 0 && d % kChainChannels == 0) next_chain(d, acc, before);
    FORGE_UNROLL
    for (int head = 0; head < Heads; ++head) {
      Vec block[kLanes];
      const Stored* first = k.first + head * k.head_stride;
      FORGE_UNROLL
      for (int i = 0; i < kLanes; ++i) block[i] = load_within(first + i * k.stride, d, hd);
      transpose(block);
      FORGE_UNROLL
      for (int i = 0; i < kLanes; ++i) {
        if (d + i == hd) break;
        FORGE_UNROLL
        for (int r = head * Rows; r < (head + 1) * Rows; ++r) {
          acc[r] = chain_step(broadcast(q[r][d + i]), block[i], acc[r]);
        }
      }
    }
  }
  if (hd > kChainChannels) {
    FORGE_UNROLL
    for (int r = 0; r < Heads * Rows; ++r) acc[r] = before[r] + acc[r];
  }
  FORGE_UNROLL
  for (int r = 0; r < Heads * Rows; ++r) {
    const PairPlace at = {place.row + r % Rows, place.key};
    store(scores + r * kMostTileKeys, map.score(acc[r], at));
  }
}

// Rows of one kv head against keys that may lie in a panel already.
template <int Rows, typename Map, typename Stored>
FORGE_INLINE void score_rows(const Real* const* q, const KeyBlock<Stored>& keys, const Real* panel,
                             Int64 hd, const Map& map, PairPlace place, Real* scores) {
  if constexpr (kKeysInRegisters) {
    if (!panel) {
      score_keys<1, Rows>(q, keys, hd, map, place, scores);
      return;
    }
  }
  score_panel<Rows>(q, panel, hd, map, place, scores);
}

// Keys, at most kPanelKeys, into a panel. Lanes past the last key repeat it.
template <typename Stored>
FORGE_NOINLINE void fill_panel(const KeyBlock<Stored>& k, Int64 hd, Real* panel) {
  for (int c = 0; c < kPanelKeys; c += kLanes) {
    const Stored* rows[kLanes];
    for (int i = 0; i < kLanes; ++i) rows[i] = k.first + smaller(c + i, k.count - 1) * k.stride;
    rows_to_lanes(rows, hd, panel + c, kPanelKeys);
  }
}

// Continues each channel's chain over p[r][key] v[key] with these keys, in the parts; starts it
// where they are the tile's first.
template <int Rows, int Vecs, typename Stored>
FORGE_INLINE void add_channels(const Real* p, const KeyBlock<Stored>& v, Int64 d, Int64 hd,
                               bool first, Real* const* parts) {
  Vec acc[Rows][Vecs];
  FORGE_UNROLL
  for (int r = 0; r < Rows; ++r) {
    FORGE_UNROLL
    for (int c = 0; c < Vecs; ++c) {
      acc[r][c] = first ? Vec{} : load(parts[r] + kPartHead + d + c * kLanes);
    }
  }
  const Stored* row = v.first + d;
  for (int key = 0; key < v.count; ++key, row += v.stride) {
    Vec value[Vecs];
    FORGE_UNROLL
    for (int c = 0; c < Vecs; ++c) {
      value[c] = Vecs > 1 ? load(row + c * kLanes) : load_within(row, 0, hd - d);
    }
    FORGE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      const Vec weight = broadcast(p[r * kMostTileKeys + key]);
      FORGE_UNROLL
      for (int c = 0; c < Vecs; ++c) acc[r][c] = fma(weight, value[c], acc[r][c]);
    }
  }
  FORGE_UNROLL
  for (int r = 0; r < Rows; ++r) {
    FORGE_UNROLL
    for (int c = 0; c < Vecs; ++c) store(parts[r] + kPartHead + d + c * kLanes, acc[r][c]);
  }
}

template <int Rows, typename Stored>
FORGE_NOINLINE void add_keys(const Real* p, const KeyBlock<Stored>& v, Int64 hd, bool first,
                             Real* const* parts) {
  constexpr int kVecs = Rows == 1 || kVectorRegisters >= 32 ? 4 : 2;
  Int64 d = 0;
  for (; d + kVecs * kLanes <= hd; d += kVecs * kLanes) {
    add_channels<Rows, kVecs>(p, v, d, hd, first, parts);
  }
  for (; d < hd; d += kLanes) add_channels<Rows, 1>(p, v, d, hd, first, parts);
}

// One row's scores of a tile become p; m and l go to its part. [from, to): the keys that the row
// sees.
FORGE_INLINE void softmax_row(Real* scores, int from, int to, Real* part) {
  const Vec lowest = broadcast(-__builtin_inff());
  const int padded = static_cast<int>(round_up(to, kLanes));
  Vec top = lowest;
  for (int key = 0; key < padded; key += kLanes) {
    const IntVec at = lane_numbers() + key;
    const Vec s = select((at >= from) & (at < to), load(scores + key), lowest);
    store(scores + key, s);
    top = max(s, top);
  }
  part[0] = max_of_lanes(top);
  const Vec base = base_of(broadcast(part[0]));
  FourLanes sum{};
  for (int key = 0; key < padded; key += kLanes) {
    const Vec p = exp_of_nonpositive(load(scores + key) - base);
    store(scores + key, p);
    sum = add_quads(sum, p);
  }
  static_assert(kKeyClasses == 4);
  part[1] = (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

// Parts of one row come to its total, by ascending keys; kLanes of them at a time, whose factors
// are worked out together.
FORGE_INLINE void merge_row(Real* total, Parts parts, Int64 count, Int64 floats) {
  for (Int64 done = 0; done < count; done += kLanes) {
    const int here = static_cast<int>(smaller(kLanes, count - done));
    const Real* first = parts.first + done * parts.stride;
    Real m = total[0], before[kLanes] = {}, own[kLanes] = {};
    for (int n = 0; n < here; ++n) {
      before[n] = m;
      own[n] = first[n * parts.stride];
      m = own[n] > m ? own[n] : m;
    }
    const Merge merge = merge_maxima(load(before), load(own));
    for (Int64 at = 0; at < floats; at += kLanes) {  // m among them, which is set below
      Vec sum = load(total + at);
      for (int n = 0; n < here; ++n) {
        const Merge one = {Vec{}, broadcast(merge.alpha[n]), broadcast(merge.beta[n])};
        sum = one(sum, load(first + n * parts.stride + at));
      }
      store(total + at, sum);
    }
    total[0] = m;
  }
}

}  // namespace
}  // namespace forge::cpu::FORGE_TARGET
