// Packing for the backward: a block's rows once, a tile's keys each time the block meets it.
#pragma once

#include <type_traits>

#include "cpu/backward/kernel.h"
#include "cpu/bias.h"
#include "cpu/panels.h"
#include "cpu/stored.h"

namespace forge::cpu::FORGE_TARGET {
namespace {

// Rows lie far apart, where hardware prefetchers do not look.
template <typename Stored>
FORGE_INLINE void prefetch(const Stored* row, Int64 n) {
  constexpr Int64 kLine = 64 / sizeof(Stored);
  for (Int64 at = 0; at < n; at += kLine) __builtin_prefetch(row + at);
}

FORGE_INLINE bool all_zero(Vec zeros) { return !any(zeros != Vec{}); }

// kLanes rows of a block, from `first` on: vector `column` of a panel of `width` vectors.
struct RowGroup {
  Int64 first;
  Int64 panel;  // the vector at which the panel starts
  int width;
  int column;
};

// Where the rows of a block go, n elements each.
struct PackedRows {
  Real* channels;
  Real* lanes;
  Int64 n;
  Int64 rows;  // that there is room for
};

// A group's rows into the panels of channels and, transposed, into their column of a panel of rows;
// null rows as zeros. Whole: no null rows, no partial vectors. Returns NaN lanes where an element
// is not finite, else zeros.
template <bool Whole, typename Stored>
FORGE_INLINE Vec pack_rows(const PackedRows& to_rows, const RowGroup& group,
                           const Stored* const (&rows)[kLanes]) {
  const Int64 n = to_rows.n, vecs = ceil_div(n, kLanes), step = group.width * kLanes;
  Real* column = to_rows.lanes + group.panel * kLanes * n + group.column * kLanes;
  Vec zeros{};
  for (Int64 at = 0; at < vecs;) {
    const int width = panel_vecs(at, vecs, kChannelVecs);
    Real* to = to_rows.channels + (at * to_rows.rows + group.first * width) * kLanes;
    for (int v = 0; v < width; ++v) {
      const Int64 d = (at + v) * kLanes, left = n - d;
      Vec x[kLanes];
      FORGE_UNROLL
      for (int j = 0; j < kLanes; ++j) {
        x[j] = Whole ? load(rows[j] + d) : rows[j] ? load_within(rows[j], d, n) : Vec{};
        zeros = fma(x[j], Vec{}, zeros);
        store(to + (j * width + v) * kLanes, x[j]);
      }
      transpose(x);
      FORGE_UNROLL
      for (int j = 0; j < kLanes; ++j) {
        if (Whole || j < left) store(column + (d + j) * step, x[j]);
      }
    }
    at += width;
  }
  return zeros;
}

// The dot products of kLanes pairs of rows, one a lane; 0 for null rows.
template <bool Whole, typename A, typename B>
FORGE_INLINE Vec dot_pairs(const A* const (&a)[kLanes], const B* const (&b)[kLanes], Int64 n) {
  Vec sums[kLanes];
  FORGE_UNROLL
  for (int j = 0; j < kLanes; ++j) {
    Vec sum{};
    for (Int64 at = 0; (Whole || a[j]) && at < n; at += kLanes) {
      sum = Whole ? fma(load(a[j] + at), load(b[j] + at), sum)
                  : fma(load_within(a[j], at, n), load_within(b[j], at, n), sum);
    }
    sums[j] = sum;
  }
  transpose(sums);
  FORGE_UNROLL
  for (int count = kLanes / 2; count > 0; count /= 2) {
    FORGE_UNROLL
    for (int j = 0; j < count; ++j) sums[j] = sums[j] + sums[j + count];
  }
  return sums[0];
}

// The arrays that hold query rows.
template <typename Stored, typename Out>
struct RowArrays {
  const Stored* q;
  const Stored* dout;
  const Out* o;
};

// The rows of a group in the arrays, null where they count for nothing.
template <typename Stored, typename Out>
struct RowsOf {
  const Stored* q[kLanes];
  const Stored* dout[kLanes];
  const Out* o[kLanes];
};

template <bool Whole, typename Stored, typename Out>
FORGE_INLINE Vec pack_group(BackwardBlock& block, const RowGroup& group,
                            const RowsOf<Stored, Out>& rows) {
  const BackwardTiling& tiling = block.tiling;
  store(block.d_row + group.first, dot_pairs<Whole>(rows.dout, rows.o, tiling.hv));
  const PackedRows q = {block.q_rows, block.q_lanes, tiling.hd, tiling.rows};
  const PackedRows dout = {block.dout_rows, block.dout_lanes, tiling.hv, tiling.rows};
  return pack_rows<Whole>(q, group, rows.q) + pack_rows<Whole>(dout, group, rows.dout);
}

// Whether a row's sink is all that counts there, by what the forward left of it: then it saw no
// key, or none with another score than -inf. (Or keys so far below the sink that they left
// nothing.)
FORGE_INLINE bool is_sink_alone(const BackwardProblem& problem, Int64 b, Int64 h, Int64 i) {
  const BackwardArrays& arrays = problem.arrays;
  const Int64 row = row_index(problem.params, b, h, i);
  if (!arrays.sinks.data || arrays.row_sum[row] != 1) return false;
  if (arrays.row_max[row] != sink_of(arrays.sinks, b, h, i)) return false;
  const Real* o = arrays.o + element_offset(problem.params.o, b, i, h);
  Vec nonzero{};
  for (Int64 at = 0; at < problem.params.hv; at += kLanes) {
    const Vec x = load_within(o, at, problem.params.hv);
    nonzero = select(x == Vec{}, nonzero, broadcast(1));
  }
  return all_zero(nonzero);
}

template <typename Stored>
FORGE_INLINE bool is_finite(const Stored* row, Int64 n) {
  Vec zeros{};
  for (Int64 at = 0; at < n; at += kLanes) zeros = fma(load_within(row, at, n), Vec{}, zeros);
  return all_zero(zeros);
}

// Packs a group of rows; `place` is that of its first and moves to that of the next group.
template <typename Stored, typename Out>
FORGE_INLINE Vec load_group(const BackwardProblem& problem, const RowArrays<Stored, Out>& arrays,
                            BackwardBlock& block, const RowGroup& group, RowCursor& place) {
  const AttnParams& params = problem.params;
  RowsOf<Stored, Out> rows = {};
  Int64 stats_at[kLanes];
  const Int64 present = block.rows - group.first;
  bool whole = params.hd % kLanes == 0 && params.hv % kLanes == 0;
  for (int j = 0; j < kLanes; ++j) {
    const Int64 r = group.first + j, b = block.b, i = place.query, h = place.head;
    stats_at[j] = j < present ? row_index(params, b, h, i) : -1;
    if (is_live(block, r)) {
      rows.q[j] = arrays.q + element_offset(params.q, b, i, h);
      rows.dout[j] = arrays.dout + element_offset(params.dout, b, i, h);
      rows.o[j] = arrays.o + element_offset(params.o, b, i, h);
      // Its zeros would make NaN of these.
      if (is_sink_alone(problem, b, h, i) &&
          !(is_finite(rows.q[j], params.hd) && is_finite(rows.dout[j], params.hv))) {
        rows.q[j] = rows.dout[j] = nullptr;
        block.seen[r] = block.all = nothing();
        block.all_live = false;
      }
    }
    const bool live = rows.q[j] != nullptr;
    whole = whole && live;
    block.row_max[r] = live ? problem.arrays.row_max[stats_at[j]] : 0;
    block.inverse_sum[r] = live ? 1 / problem.arrays.row_sum[stats_at[j]] : 0;
    if (j < present) place.next();
  }
  const Vec zeros =
      whole ? pack_group<true>(block, group, rows) : pack_group<false>(block, group, rows);
  for (int j = 0; j < kLanes && j < present; ++j) {
    Real& d = block.d_row[group.first + j];
    if (problem.arrays.dlse && rows.q[j]) d -= problem.arrays.dlse[stats_at[j]];
  }
  return zeros;
}

template <typename Stored, typename Out>
FORGE_INLINE void prefetch_row(const AttnParams& params, const RowArrays<Stored, Out>& arrays,
                               Int64 b, const RowCursor& at) {
  prefetch(arrays.q + element_offset(params.q, b, at.query, at.head), params.hd);
  prefetch(arrays.o + element_offset(params.o, b, at.query, at.head), params.hv);
  prefetch(arrays.dout + element_offset(params.dout, b, at.query, at.head), params.hv);
}

template <typename Stored, typename Out>
FORGE_INLINE void load_rows_of(const BackwardProblem& problem, const RowArrays<Stored, Out>& arrays,
                               BackwardBlock& block) {
  const Int64 row_vecs = ceil_div(block.rows, kLanes);
  RowCursor place = row_cursor(problem.params, block.kv_head, block.row_begin);
  RowCursor ahead = place;
  Int64 prefetched = 0;
  Vec zeros{};
  for (Int64 panel = 0; panel < row_vecs;) {
    const int width = panel_vecs(panel, row_vecs, kRowVecs);
    for (int column = 0; column < width; ++column) {
      const Int64 first = (panel + column) * kLanes;
      for (; prefetched < first + 2 * kLanes && prefetched < block.rows; ++prefetched) {
        prefetch_row(problem.params, arrays, block.b, ahead);
        ahead.next();
      }
      zeros = zeros + load_group(problem, arrays, block, {first, panel, width, column}, place);
    }
    panel += width;
  }
  block.rows_finite = all_zero(zeros);
}

void load_rows(const BackwardProblem& problem, BackwardBlock& block) {
  const BackwardArrays& arrays = problem.arrays;
  with_elements(arrays.q, [&](auto* q) {
    using Stored = std::remove_pointer_t<decltype(q)>;
    load_rows_of(problem, RowArrays<Stored, Real>{q, elements_like(q, arrays.dout), arrays.o},
                 block);
  });
}

// One key or value of n channels; what it holds past them are zeros.
template <typename Stored>
FORGE_INLINE Vec pack_key(const Stored* from, Int64 n, Real* to) {
  Vec zeros{};
  for (Int64 at = 0; at < n; at += kLanes) {
    const Vec x = load_within(from, at, n);
    zeros = fma(x, Vec{}, zeros);
    store(to + at, x);
  }
  return zeros;
}

template <typename Stored>
FORGE_INLINE void load_keys_of(const AttnParams& params, const Stored* k, const Stored* v,
                               BackwardBlock& block) {
  // Copies, since the stores below might change what they are copies of, for all a compiler knows.
  const BackwardTiling tiling = block.tiling;
  const Int64 count = block.tile_keys, k_row = params.k.row, v_row = params.v.row;
  const Int64 ahead = params.Tk - block.tile_begin - tiling.keys;  // keys after this tile
  Real* const k_to = block.k;
  Real* const v_to = block.v;
  k += element_offset(params.k, block.b, block.tile_begin, block.kv_head);
  v += element_offset(params.v, block.b, block.tile_begin, block.kv_head);
  Vec zeros{}, value_zeros{};
  for (Int64 key = 0; key < count; ++key) {
    if (key < ahead) {
      prefetch(k + (key + tiling.keys) * k_row, tiling.hd);
      prefetch(v + (key + tiling.keys) * v_row, tiling.hv);
    }
    zeros = zeros + pack_key(k + key * k_row, tiling.hd, k_to + key * tiling.key_stride);
    value_zeros =
        value_zeros + pack_key(v + key * v_row, tiling.hv, v_to + key * tiling.value_stride);
  }
  block.keys_finite = all_zero(zeros);
  block.values_finite = all_zero(value_zeros);
}

// Which rows see which keys of the tile; false: none sees any.
FORGE_INLINE bool find_seen(BackwardBlock& block) {
  const Int32 rows = static_cast<Int32>(round_up(block.rows, kLanes));
  const int keys = static_cast<int>(block.tile_keys);
  for (int key = 0; key < keys; ++key) {
    block.rows_from[key] = rows;
    block.rows_to[key] = 0;
  }
  bool any = false;
  for (Int32 r = 0, next; r < rows; r = next) {
    const int from = key_in_tile(block.seen[r].begin, block.tile_begin, keys);
    const int to = key_in_tile(block.seen[r].end, block.tile_begin, keys);
    for (next = r; next < rows; ++next) {  // the rows that see the same
      if (key_in_tile(block.seen[next].begin, block.tile_begin, keys) != from ||
          key_in_tile(block.seen[next].end, block.tile_begin, keys) != to) {
        break;
      }
      block.seen_from[next] = from;
      block.seen_to[next] = to;
    }
    for (int key = from; key < to; ++key) {
      any = true;
      if (block.rows_from[key] > r) block.rows_from[key] = r;
      block.rows_to[key] = next;
    }
  }
  return any;
}

bool find_tile(const BackwardProblem& problem, BackwardBlock& block) {
  const IndexRange keys = {block.tile_begin, block.tile_begin + block.tile_keys};
  block.edge = block.all.begin > keys.begin || keys.end > block.all.end;
  if (block.edge && !find_seen(block)) return false;
  block.bias = nullptr;
  if (problem.arrays.pairs.given()) {
    const BiasTile tile = pack_bias(problem.arrays.pairs, block.pairs, round_up(block.rows, kLanes),
                                    keys, block.bias_room, block.tiling.pair_stride);
    if (tile.hides_all) return false;
    block.bias = tile.at;
  }
  return true;
}

void load_keys(const BackwardProblem& problem, BackwardBlock& block) {
  with_elements(problem.arrays.k, [&](const auto* k) {
    load_keys_of(problem.params, k, elements_like(k, problem.arrays.v), block);
  });
  if (block.edge) return;
  // Rows that count for nothing give zeros without a mask, unless a key or a bias makes NaN of
  // them. And where a bias hides pairs, what is not finite must not meet their zeros (tile.h).
  const bool finite = block.keys_finite && block.values_finite;
  const bool zeros = block.all_live || (finite && !block.bias);
  if (zeros && (!block.bias || (finite && block.rows_finite))) return;
  block.edge = true;
  find_seen(block);
}

}  // namespace
}  // namespace forge::cpu::FORGE_TARGET
