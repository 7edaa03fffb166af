// Packing for the backward: a block's rows once, a tile's keys each time the block meets it.
#pragma once

#include <type_traits>

#include "cpu/backward/kernel.h"
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

// A group's rows into the panels of channels and, transposed, into their column of a panel of rows;
// null rows as zeros. Whole: no null rows, no partial vectors. Returns NaN lanes where an element
// is not finite, else zeros.
template <bool Whole, typename Stored>
FORGE_INLINE Vec pack_rows(const BackwardTiling& tiling, const RowGroup& group,
                           const Stored* const (&rows)[kLanes], Real* channels, Real* lanes) {
  const Int64 vecs = tiling.channels / kLanes, step = group.width * kLanes;
  Real* column = lanes + group.panel * kLanes * tiling.hd + group.column * kLanes;
  Vec zeros{};
  for (Int64 at = 0; at < vecs;) {
    const int width = panel_vecs(at, vecs, kChannelVecs);
    Real* to = channels + (at * tiling.rows + group.first * width) * kLanes;
    for (int v = 0; v < width; ++v) {
      const Int64 d = (at + v) * kLanes, left = tiling.hd - d;
      Vec x[kLanes];
      FORGE_UNROLL
      for (int j = 0; j < kLanes; ++j) {
        x[j] = Whole ? load(rows[j] + d) : rows[j] ? load_within(rows[j], d, tiling.hd) : Vec{};
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
  store(block.d_row + group.first, dot_pairs<Whole>(rows.dout, rows.o, tiling.hd));
  return pack_rows<Whole>(tiling, group, rows.q, block.q_rows, block.q_lanes) +
         pack_rows<Whole>(tiling, group, rows.dout, block.dout_rows, block.dout_lanes);
}

// Packs a group of rows; `place` is that of its first and moves to that of the next group.
template <typename Stored, typename Out>
FORGE_INLINE Vec load_group(const BackwardProblem& problem, const RowArrays<Stored, Out>& arrays,
                            BackwardBlock& block, const RowGroup& group, RowCursor& place) {
  const AttnParams& params = problem.params;
  RowsOf<Stored, Out> rows = {};
  Int64 stats_at[kLanes];
  const Int64 present = block.rows - group.first;
  for (int j = 0; j < kLanes; ++j) {
    const Int64 r = group.first + j, b = block.b, i = place.query, h = place.head;
    const bool live = contains(block.live, r);
    stats_at[j] = j < present ? row_index(params, b, h, i) : -1;
    if (live) {
      rows.q[j] = arrays.q + element_offset(params.q, b, i, h);
      rows.dout[j] = arrays.dout + element_offset(params.dout, b, i, h);
      rows.o[j] = arrays.o + element_offset(params.o, b, i, h);
    }
    block.row_max[r] = live ? problem.arrays.row_max[stats_at[j]] : 0;
    block.inverse_sum[r] = live ? 1 / problem.arrays.row_sum[stats_at[j]] : 0;
    if (j < present) place.next();
  }
  const bool whole = contains(block.live, group.first) &&
                     contains(block.live, group.first + kLanes - 1) && params.hd % kLanes == 0;
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
  prefetch(arrays.o + element_offset(params.o, b, at.query, at.head), params.hd);
  prefetch(arrays.dout + element_offset(params.dout, b, at.query, at.head), params.hd);
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

// One key or value; what it holds past hd are zeros.
template <typename Stored>
FORGE_INLINE Vec pack_key(const Stored* from, Int64 hd, Int64 channels, Real* to) {
  Vec zeros{};
  for (Int64 at = 0; at < channels; at += kLanes) {
    const Vec x = load_within(from, at, hd);
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
  Vec zeros{};
  for (Int64 key = 0; key < count; ++key) {
    if (key < ahead) {
      prefetch(k + (key + tiling.keys) * k_row, tiling.hd);
      prefetch(v + (key + tiling.keys) * v_row, tiling.hd);
    }
    zeros = zeros +
            pack_key(k + key * k_row, tiling.hd, tiling.channels, k_to + key * tiling.key_stride);
    pack_key(v + key * v_row, tiling.hd, tiling.channels, v_to + key * tiling.key_stride);
  }
  block.keys_finite = all_zero(zeros);
}

void load_keys(const BackwardProblem& problem, BackwardBlock& block) {
  with_elements(problem.arrays.k, [&](const auto* k) {
    load_keys_of(problem.params, k, elements_like(k, problem.arrays.v), block);
  });
  const bool padded = block.rows % kLanes != 0 || block.live.end - block.live.begin != block.rows;
  const bool whole =
      block.all.begin <= block.tile_begin && block.tile_begin + block.tile_keys <= block.all.end;
  // Rows that count for nothing give zeros without a mask, unless a key makes NaN of them.
  block.edge = !whole || (padded && !block.keys_finite);
  if (!block.edge) return;
  const Int64 row_vecs = ceil_div(block.rows, kLanes);
  for (Int64 r = 0; r < row_vecs * kLanes; ++r) {
    // Both ends stay ascending over the rows: those before the live ones see keys before any, those
    // after them keys after any.
    IndexRange seen = nothing();
    if (contains(block.live, r)) seen = block.seen[r];
    if (r >= block.live.end) seen = {int64_max(), int64_max()};
    block.seen_from[r] = key_in_tile(seen.begin, block.tile_begin, block.tile_keys);
    block.seen_to[r] = key_in_tile(seen.end, block.tile_begin, block.tile_keys);
  }
}

template <typename Stored>
FORGE_INLINE void store_dq_as(const BackwardProblem& problem, const BackwardBlock& block,
                              const Real* partial, Int64 count, Stored* dq) {
  const AttnParams& params = problem.params;
  const BackwardTiling& tiling = block.tiling;
  const Vec scale = broadcast(params.scale);
  RowCursor place = row_cursor(params, block.kv_head, block.row_begin);
  for (Int64 r = 0; r < block.rows; ++r, place.next()) {
    Stored* to = dq + element_offset(params.dq, block.b, place.query, place.head);
    const bool live = contains(block.live, r);
    if (!live && problem.accumulate) continue;
    for (Int64 at = 0; at < tiling.channels; at += kLanes) {
      Vec sum{};
      for (Int64 n = 0; live && n < count; ++n) {
        sum = sum + load(partial + (n * block.rows + r) * tiling.channels + at);
      }
      sum = sum * scale;
      if (problem.accumulate) sum = load_within(to, at, tiling.hd) + sum;
      store_within(to, at, tiling.hd, sum);
    }
  }
}

void store_dq(const BackwardProblem& problem, const BackwardBlock& block, const Real* partial,
              Int64 count) {
  with_elements(problem.arrays.dq,
                [&](auto* dq) { store_dq_as(problem, block, partial, count, dq); });
}

void store_key(const Operand& gradient, const Real* sums, Int64 b, Int64 t, bool accumulate) {
  const auto& [B, T, heads, hd] = gradient.shape;
  const Real* from = sums + (b * T + t) * heads * hd;
  const AttnStrides strides = gradient.heads_strides();
  with_elements(gradient, [&, &heads = heads, &hd = hd](auto* first) {
    for (Int64 head = 0; head < heads; ++head, from += hd) {
      auto* to = first + element_offset(strides, b, t, head);
      for (Int64 at = 0; at < hd; at += kLanes) {
        Vec sum = load_within(from, at, hd);
        if (accumulate) sum = load_within(to, at, hd) + sum;
        store_within(to, at, hd, sum);
      }
    }
  });
}

}  // namespace
}  // namespace forge::cpu::FORGE_TARGET
