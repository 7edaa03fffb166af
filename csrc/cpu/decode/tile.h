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
  Int64 width;  // channels
  int count;
};

constexpr Int64 kLineBytes = 64;

// Lines of memory to prefetch, one at a time, between the loads of what is worked on meanwhile:
// these would wait behind all of them at once.
class LinesAhead {
 public:
  // Of `rows` rows, `width` bytes of each.
  LinesAhead(const void* first, Int64 stride, int rows, Int64 width)
      : at_(static_cast<const char*>(first)),
        row_end_(at_ + width),
        width_(width),
        stride_(stride),
        rows_(rows) {}

  FORGE_MEMBER void next() {
    if (rows_ <= 0) return;
    __builtin_prefetch(at_, 0, 3);
    at_ += kLineBytes;
    if (at_ < row_end_) return;
    --rows_;
    row_end_ += stride_;
    at_ = row_end_ - width_;
  }
  FORGE_MEMBER void rest() {
    while (rows_ > 0) next();
  }

 private:
  const char* at_;
  const char* row_end_;
  Int64 width_;
  Int64 stride_;
  int rows_;
};

// Beside the load of a vector, the n-th of a row or of neighbouring rows.
template <typename Stored>
FORGE_INLINE void fetch_beside(LinesAhead& ahead, int n) {
  constexpr int kLoads = static_cast<int>(kLineBytes / (kLanes * Int64{sizeof(Stored)}));  // a line
  if (n % kLoads == 0) ahead.next();
}

// Which share of the rows ahead a step prefetches: `count` turns from `turn` on, of `turns` a head.
struct Turn {
  int turn;
  int count;
  int turns;
  int heads;
};

// In the memory's order where the heads of a row lie side by side.
template <typename Stored>
FORGE_INLINE LinesAhead share_ahead(const KeyBlock<Stored>& rows, const Turn& at) {
  const Int64 size = sizeof(Stored), stride = rows.stride * size, width = rows.width * size;
  if (rows.head_stride == rows.width) {
    const int all = at.heads * at.turns;
    const int begin = rows.count * at.turn / all, end = rows.count * (at.turn + at.count) / all;
    return {rows.first + begin * rows.stride, stride, end - begin, at.heads * width};
  }
  const Stored* first = rows.first + at.turn / at.turns * rows.head_stride;
  if (at.count > at.turns) {  // a second head
    LinesAhead(first + rows.head_stride, stride, rows.count, width).rest();
    return {first, stride, rows.count, width};
  }
  const int within = at.turn % at.turns;
  const int begin = rows.count * within / at.turns;
  const int end = rows.count * (within + at.count) / at.turns;
  return {first + begin * rows.stride, stride, end - begin, width};
}

// The rows [key, key + step), as many as there are, from `head` on.
template <typename Stored>
FORGE_INLINE KeyBlock<Stored> rows_from(const KeyBlock<Stored>& block, Int64 head, int key,
                                        int step) {
  return {block.first + head * block.head_stride + key * block.stride, block.stride,
          block.head_stride, block.width,
          static_cast<int>(larger(0, smaller(step, block.count - key)))};
}

// scores[r][key] for the keys of a panel: hd times kPanelKeys, keys in lanes. The map sees where a
// score lies from `scores` on.
template <int Rows, typename Map>
FORGE_NOINLINE void score_panel(const Real* const* q, const Real* panel, Int64 hd, const Map& map,
                                Real* scores) {
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
        const Int64 at = r * kMostTileKeys + (c + i) * kLanes;
        store(scores + at, map.score(acc[r][i], at));
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

// The same straight from kLanes rows of keys, transposed in registers: each line of memory is
// loaded once, whole. Heads: kv heads side by side, so that several chains run even with one row.
template <int Heads, int Rows, typename Map, typename Stored>
FORGE_NOINLINE void score_keys(const Real* const* q, const KeyBlock<Stored>& k, Int64 hd,
                               const Map& map, LinesAhead& lines, Real* scores) {
  LinesAhead ahead = lines;
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
          ahead.next();
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
        fetch_beside<Stored>(ahead, row);
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
  lines = ahead;
  if (hd > kChainChannels) {
    FORGE_UNROLL
    for (int r = 0; r < Heads * Rows; ++r) acc[r] = before[r] + acc[r];
  }
  FORGE_UNROLL
  for (int r = 0; r < Heads * Rows; ++r) {
    const Int64 at = r * kMostTileKeys;
    store(scores + at, map.score(acc[r], at));
  }
}

// Rows of one kv head against keys that may lie in a panel already.
template <int Rows, typename Map, typename Stored>
FORGE_INLINE void score_rows(const Real* const* q, const KeyBlock<Stored>& keys, const Real* panel,
                             Int64 hd, const Map& map, [[maybe_unused]] LinesAhead& ahead,
                             Real* scores) {
  if constexpr (kKeysInRegisters) {
    if (!panel) {
      score_keys<1, Rows>(q, keys, hd, map, ahead, scores);
      return;
    }
  }
  score_panel<Rows>(q, panel, hd, map, scores);
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

// Goes on with each channel's chain over p[r][key] v[key], in the parts, or starts it.
template <int Rows, int Vecs, typename Stored>
FORGE_INLINE void add_channels(const Real* p, const KeyBlock<Stored>& v, Int64 d, bool first,
                               LinesAhead& lines, Real* const* parts) {
  // The even and the odd channels of each two vectors: a shift and a mask widen them.
  constexpr bool kInPairs = std::is_same_v<Stored, BFloat16> && Vecs % 2 == 0;
  LinesAhead ahead = lines;
  Vec acc[Rows][Vecs];
  FORGE_UNROLL
  for (int r = 0; r < Rows; ++r) {
    FORGE_UNROLL
    for (int c = 0; c < Vecs; ++c) {
      acc[r][c] = first ? Vec{} : load(parts[r] + kPartHead + d + c * kLanes);
    }
    if constexpr (kInPairs) {
      FORGE_UNROLL
      for (int c = 0; c < Vecs; c += 2) split_pairs(acc[r][c], acc[r][c + 1]);
    }
  }
  const Stored* row = v.first + d;
  for (int key = 0; key < v.count; ++key, row += v.stride) {
    Vec value[Vecs];
    FORGE_UNROLL
    for (int c = 0; c < Vecs; ++c) {
      fetch_beside<Stored>(ahead, c);
      if constexpr (kInPairs) {
        if (c % 2 == 1) continue;
        const Vec pairs = load_pairs(row + c * kLanes);
        value[c] = even_of_pairs(pairs);
        value[c + 1] = odd_of_pairs(pairs);
      } else {
        value[c] = Vecs > 1 ? load(row + c * kLanes) : load_within(row, 0, v.width - d);
      }
    }
    FORGE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      const Vec weight = broadcast(p[r * kMostTileKeys + key]);
      FORGE_UNROLL
      for (int c = 0; c < Vecs; ++c) acc[r][c] = fma(weight, value[c], acc[r][c]);
    }
  }
  lines = ahead;
  FORGE_UNROLL
  for (int r = 0; r < Rows; ++r) {
    if constexpr (kInPairs) {
      FORGE_UNROLL
      for (int c = 0; c < Vecs; c += 2) join_pairs(acc[r][c], acc[r][c + 1]);
    }
    FORGE_UNROLL
    for (int c = 0; c < Vecs; ++c) store(parts[r] + kPartHead + d + c * kLanes, acc[r][c]);
  }
}

template <int Rows, typename Stored>
FORGE_NOINLINE void add_keys(const Real* p, const KeyBlock<Stored>& v, bool first,
                             LinesAhead& ahead, Real* const* parts) {
  constexpr int kVecs = Rows == 1 || kVectorRegisters >= 32 ? 4 : 2;
  Int64 d = 0;
  for (; d + kVecs * kLanes <= v.width; d += kVecs * kLanes) {
    add_channels<Rows, kVecs>(p, v, d, first, ahead, parts);
  }
  for (; d < v.width; d += kLanes) add_channels<Rows, 1>(p, v, d, first, ahead, parts);
}

// One row's part anew where a bias or a mask hides some of the keys and the sums are NaN, as 0 *
// NaN makes them: of the other keys alone, in the same chains.
template <typename Stored>
FORGE_NOINLINE void mend_part(const Real* p, const Real* bias, const KeyBlock<Stored>& v,
                              Real* part) {
  IntVec nan{};
  for (Int64 d = 0; d < v.width; d += kLanes) {
    const Vec sum = load(part + kPartHead + d);
    nan |= sum != sum;
  }
  if (!any(nan)) return;
  for (Int64 d = 0; d < v.width; d += kLanes) {
    Vec sum{};
    for (int key = 0; key < v.count; ++key) {
      if (bias[key] == -__builtin_inff()) continue;
      const Vec value = load_within(v.first + key * v.stride + d, 0, v.width - d);
      sum = fma(broadcast(p[key]), value, sum);
    }
    store(part + kPartHead + d, sum);
  }
}

// One row's scores of a tile become p; m and l go to its part. [from, to): the keys that the row
// sees; bias: for each key of the tile, what is added.
template <bool Biased>
FORGE_INLINE void softmax_row(Real* scores, const Real* bias, int from, int to, Real* part) {
  const Vec lowest = broadcast(-__builtin_inff());
  const int padded = static_cast<int>(round_up(to, kLanes));
  Vec top = lowest;
  for (int key = 0; key < padded; key += kLanes) {
    const IntVec at = lane_numbers() + key;
    Vec s = load(scores + key);
    if (Biased) s = add_bias(s, load(bias + key));
    s = select((at >= from) & (at < to), s, lowest);
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
