// The five products of a tile of keys with a block of rows.
//   scores         s = q k^T, dp = do v^T, as [key][row]: rows in lanes, keys broadcast, so that
//                  row_max, row_sum and d_row are plain vectors; p and ds stay in scratch
//   key_gradients  dv += p do, dk += ds q: channels in lanes, p and ds broadcast
//   row_gradients  dq += ds^T k
#pragma once

#include "cpu/backward/kernel.h"
#include "cpu/panels.h"
#include "cpu/scores.h"
#include "cpu/stored.h"

namespace forge::cpu::FORGE_TARGET {
namespace {

// The factor that is broadcast: element (m, n) at at[m * row + n * step].
struct Weights {
  const Real* at;
  Int64 row;
  Int64 step;
};

// acc[m][v] = sum over n < count of a(m, n) * b[n][v], n ascending.
template <int Rows, int Vecs>
FORGE_INLINE void multiply(const Weights& a, const Real* b, Int64 b_stride, Int64 count,
                           Vec (&acc)[Rows][Vecs]) {
  FORGE_UNROLL
  for (int m = 0; m < Rows; ++m) {
    FORGE_UNROLL
    for (int v = 0; v < Vecs; ++v) acc[m][v] = Vec{};
  }
  for (Int64 n = 0; n < count; ++n) {
    Vec lane[Vecs];
    FORGE_UNROLL
    for (int v = 0; v < Vecs; ++v) lane[v] = load(b + n * b_stride + v * kLanes);
    FORGE_UNROLL
    for (int m = 0; m < Rows; ++m) {
      const Vec x = broadcast(a.at[m * a.row + n * a.step]);
      FORGE_UNROLL
      for (int v = 0; v < Vecs; ++v) acc[m][v] = fma(x, lane[v], acc[m][v]);
    }
  }
}

// Keys of the tile that some row of [row, row + count) sees.
FORGE_INLINE IndexRange keys_seen(const BackwardBlock& block, Int64 row, Int64 count) {
  if (!block.edge) return {0, block.tile_keys};
  IndexRange keys = nothing();
  for (Int64 r = row; r < row + count; ++r) {
    keys = hull(keys, {block.seen_from[r], block.seen_to[r]});
  }
  return keys;
}

// Rows between the first and the last that see some key of [key, key + count).
FORGE_INLINE IndexRange rows_seeing(const BackwardBlock& block, Int64 key, Int64 count) {
  if (!block.edge) return {0, block.rows};
  IndexRange rows = nothing();
  for (Int64 j = key; j < key + count; ++j) {
    rows = hull(rows, {block.rows_from[j], block.rows_to[j]});
  }
  return rows;
}

FORGE_INLINE IntVec visible(const BackwardBlock& block, Int64 row, Int64 key) {
  IntVec from, to;
  __builtin_memcpy(&from, block.seen_from + row, sizeof from);
  __builtin_memcpy(&to, block.seen_to + row, sizeof to);
  const IntVec at = broadcast_int(static_cast<RealBits>(key));
  return (from <= at) & (at < to);
}

// Whether a map adds a bias, which may hide pairs.
template <typename Map>
constexpr bool kHides = false;
template <typename Map>
constexpr bool kHides<BiasedMap<Map>> = true;

FORGE_INLINE bool sees(const BackwardBlock& block, Int64 row, Int64 key) {
  if (key < block.seen_from[row] || key >= block.seen_to[row]) return false;
  return !block.bias || block.bias[key * block.tiling.pair_stride + row] != -__builtin_inff();
}

template <bool Edge, typename Map>
struct ScorePanels {
  const BackwardBlock& block;
  const Map map;  // a copy: stores through pointers cannot change it

  // Zero where a pair is not visible.
  FORGE_MEMBER Vec only_visible(Vec x, Int64 row, Int64 key) const {
    if (Edge) x = select(visible(block, row, key), x, Vec{});
    if constexpr (kHides<Map>) {
      x = select(hides(load(map.bias + key * block.tiling.pair_stride + row)), Vec{}, x);
    }
    return x;
  }

  // p from the dot products that p holds, of one row vector and `keys` keys.
  FORGE_MEMBER void probabilities(Int64 row, Int64 key, int keys) const {
    const Vec m = load(block.row_max + row), inverse = load(block.inverse_sum + row);
    for (int j = 0; j < keys; ++j) {
      Real* at = block.p + (key + j) * block.tiling.pair_stride + row;
      Vec slope;
      Vec t = map.score(load(at), at - block.p, slope) - m;
      t = select(t > Vec{}, Vec{}, t);  // NaN stays
      store(at, only_visible(exp_of_nonpositive(t) * inverse, row, key + j));
      if constexpr (Map::kHasSlope) {
        store(block.slope + (key + j) * block.tiling.pair_stride + row, slope);
      }
    }
  }

  // Not inlined, nor is ds_group: the chains then keep all registers.
  template <int Vecs>
  FORGE_NOINLINE void score_group(const Real* q, Int64 row, Int64 key) const {
    constexpr int kRows = tile_rows<Vecs>();
    const BackwardTiling& tiling = block.tiling;
    Vec acc[kRows][Vecs];
    dot_rows<kRows, Vecs>(block.k + key * tiling.key_stride, tiling.key_stride, q, Vecs * kLanes,
                          tiling.hd, acc);
    Real* p = block.p + key * tiling.pair_stride + row;
    FORGE_UNROLL
    for (int j = 0; j < kRows; ++j) {
      FORGE_UNROLL
      for (int c = 0; c < Vecs; ++c) store(p + j * tiling.pair_stride + c * kLanes, acc[j][c]);
    }
  }

  template <int Vecs>
  FORGE_NOINLINE void ds_group(const Real* dout, Int64 row, Int64 key) const {
    constexpr int kRows = tile_rows<Vecs>();
    const BackwardTiling& tiling = block.tiling;
    Vec acc[kRows][Vecs];
    dot_rows<kRows, Vecs>(block.v + key * tiling.value_stride, tiling.value_stride, dout,
                          Vecs * kLanes, tiling.hv, acc);
    const Int64 base = key * tiling.pair_stride + row;
    FORGE_UNROLL
    for (int c = 0; c < Vecs; ++c) {
      const Vec d = load(block.d_row + row + c * kLanes);
      FORGE_UNROLL
      for (int j = 0; j < kRows; ++j) {
        const Int64 at = base + j * tiling.pair_stride + c * kLanes;
        Vec ds = load(block.p + at) * (acc[j][c] - d);
        if constexpr (Map::kHasSlope) {
          if (block.bias_ds) {
            store(block.bias_ds + at, only_visible(ds, row + c * kLanes, key + j));
          }
          ds = ds * load(block.slope + at);
        }
        store(block.ds + at, only_visible(ds, row + c * kLanes, key + j));
      }
    }
  }

  FORGE_MEMBER void clear(Int64 row, int vecs, Int64 key, Int64 end) const {
    for (; key < end; ++key) {
      for (int c = 0; c < vecs; ++c) {
        const Int64 at = key * block.tiling.pair_stride + row + c * kLanes;
        store(block.p + at, Vec{});
        store(block.ds + at, Vec{});
        if (Map::kHasSlope && block.bias_ds) store(block.bias_ds + at, Vec{});
      }
    }
  }

  template <int Vecs>
  FORGE_MEMBER void run(Int64 at) const {
    constexpr int kRows = tile_rows<Vecs>();
    const Int64 row = at * kLanes;
    const IndexRange keys = keys_seen(block, row, Vecs * kLanes);
    const Real* q = block.q_lanes + row * block.tiling.hd;
    const Real* dout = block.dout_lanes + row * block.tiling.hv;
    if (Edge) clear(row, Vecs, 0, keys.begin);
    Int64 key = keys.begin;
    for (; key < keys.end; key += kRows) {
      score_group<Vecs>(q, row, key);
      FORGE_UNROLL
      for (int c = 0; c < Vecs; ++c) probabilities(row + c * kLanes, key, kRows);
    }
    for (key = keys.begin; key < keys.end; key += kRows) ds_group<Vecs>(dout, row, key);
    if (Edge) clear(row, Vecs, key, block.tile_keys);
  }
};

template <bool Edge, typename Map>
void score_tile(const BackwardBlock& block, const Map& map) {
  const ScorePanels<Edge, Map> panels{block, map};
  for_panels<kRowVecs>(ceil_div(block.rows, kLanes), panels);
}

// Where a product goes: rows of hd or hv elements, of which `rows` are there from `at` on.
struct Sink {
  Real* at;
  Int64 stride;
  Int64 rows;
  Int64 channels;
  Real alpha;
  bool add;
};

FORGE_INLINE Sink from_row(const Sink& sink, Int64 row) {
  // Member by member: a copy to change would go through memory, and wait for it.
  return {sink.at + row * sink.stride,
          sink.stride,
          sink.rows - row,
          sink.channels,
          sink.alpha,
          sink.add};
}

// sink = or += alpha * acc, channels from `channel` on. A zero that is stored is +0, like a sum's:
// its sign would tell which zeros acc has been through.
template <int Rows, int Vecs>
FORGE_INLINE void put(const Sink& sink, Int64 channel, const Vec (&acc)[Rows][Vecs]) {
  const Vec alpha = broadcast(sink.alpha);
  const bool add = sink.add;
  if (sink.rows >= Rows && channel + Vecs * kLanes <= sink.channels) {
    FORGE_UNROLL
    for (int m = 0; m < Rows; ++m) {
      FORGE_UNROLL
      for (int v = 0; v < Vecs; ++v) {
        Real* at = sink.at + m * sink.stride + channel + v * kLanes;
        store(at, fma(acc[m][v], alpha, add ? load(at) : Vec{}));
      }
    }
    return;
  }
  FORGE_UNROLL
  for (int m = 0; m < Rows; ++m) {
    if (m >= sink.rows) break;
    FORGE_UNROLL
    for (int v = 0; v < Vecs; ++v) {
      const Int64 at = channel + v * kLanes;
      Real* row = sink.at + m * sink.stride;
      const Vec old = add ? load_within(row, at, sink.channels) : Vec{};
      store_within(row, at, sink.channels, fma(acc[m][v], alpha, old));
    }
  }
}

// The gradients of keys come from a cache further out; the product hides the way.
template <int Rows, int Vecs>
FORGE_INLINE void prefetch_sink(const Sink& sink, Int64 channel) {
  constexpr int kLine = 64 / sizeof(Real);
  FORGE_UNROLL
  for (int m = 0; m < Rows; ++m) {
    if (m >= sink.rows) break;
    for (int at = 0; at < Vecs * kLanes; at += kLine) {
      __builtin_prefetch(sink.at + m * sink.stride + channel + at, 1);
    }
  }
}

// One of dk, dv: sum over rows of weights[key][row] * source[row].
struct KeyGradient {
  const BackwardBlock& block;
  const Real* weights;
  const Real* source;  // packed by panels of channels
  Sink out;            // of the tile's keys

  // Visible pairs only, one by one: what is packed of the others may be NaN, and 0 * NaN is NaN.
  // The chains are those of the tiles, less their zeros, so that finite results keep their bits.
  template <int Vecs>
  FORGE_MEMBER void run_exactly(Int64 at, const Real* panel) const {
    for (Int64 key = 0; key < block.tile_keys; ++key) {
      for (int v = 0; v < Vecs; ++v) {
        Vec acc[1][1] = {};
        for (Int64 row = 0; row < block.rows; ++row) {
          if (!sees(block, row, key)) continue;
          acc[0][0] = fma(broadcast(weights[key * block.tiling.pair_stride + row]),
                          load(panel + (row * Vecs + v) * kLanes), acc[0][0]);
        }
        put<1, 1>(from_row(out, key), (at + v) * kLanes, acc);
      }
    }
  }

  template <int Vecs>
  FORGE_MEMBER void run(Int64 at) const {
    constexpr int kRows = tile_rows<Vecs>();
    const BackwardTiling& tiling = block.tiling;
    const Real* panel = source + at * kLanes * tiling.rows;
    if (block.edge && !block.rows_finite) return run_exactly<Vecs>(at, panel);
    for (Int64 key = 0; key < block.tile_keys; key += kRows) {
      const Sink sink = from_row(out, key);
      prefetch_sink<kRows, Vecs>(sink, at * kLanes);
      const IndexRange rows = rows_seeing(block, key, smaller(sink.rows, kRows));
      const Weights group{weights + key * tiling.pair_stride + rows.begin, tiling.pair_stride, 1};
      Vec acc[kRows][Vecs];
      multiply<kRows, Vecs>(group, panel + rows.begin * (Vecs * kLanes), Vecs * kLanes,
                            rows.end - rows.begin, acc);
      put<kRows, Vecs>(sink, at * kLanes, acc);
    }
  }
};

// dq, unscaled: sum over keys of ds[key][row] * k[key].
struct RowGradient {
  const BackwardBlock& block;

  FORGE_MEMBER Sink sink() const {
    return {block.dq, block.tiling.channels, block.rows, block.tiling.channels, 1, true};
  }

  // As in KeyGradient.
  template <int Vecs>
  FORGE_MEMBER void run_exactly(Int64 at) const {
    const BackwardTiling& tiling = block.tiling;
    for (Int64 row = 0; row < block.rows; ++row) {
      for (int v = 0; v < Vecs; ++v) {
        const Int64 channel = (at + v) * kLanes;
        Vec acc[1][1] = {};
        for (Int64 key = 0; key < block.tile_keys; ++key) {
          if (!sees(block, row, key)) continue;
          acc[0][0] = fma(broadcast(block.ds[key * tiling.pair_stride + row]),
                          load(block.k + key * tiling.key_stride + channel), acc[0][0]);
        }
        put<1, 1>(from_row(sink(), row), channel, acc);
      }
    }
  }

  template <int Vecs>
  FORGE_MEMBER void run(Int64 at) const {
    constexpr int kRows = tile_rows<Vecs>();
    const BackwardTiling& tiling = block.tiling;
    if (block.edge && !block.keys_finite) return run_exactly<Vecs>(at);
    for (Int64 row = 0; row < block.rows; row += kRows) {
      const Int64 left = block.rows - row;
      const IndexRange keys = keys_seen(block, row, left < kRows ? left : kRows);
      if (keys.begin == keys.end) continue;
      const Weights group{block.ds + keys.begin * tiling.pair_stride + row, 1, tiling.pair_stride};
      Vec acc[kRows][Vecs];
      multiply<kRows, Vecs>(group, block.k + keys.begin * tiling.key_stride + at * kLanes,
                            tiling.key_stride, keys.end - keys.begin, acc);
      put<kRows, Vecs>(from_row(sink(), row), at * kLanes, acc);
    }
  }
};

}  // namespace
}  // namespace forge::cpu::FORGE_TARGET
