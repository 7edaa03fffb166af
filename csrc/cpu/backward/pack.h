// Packing for the backward: a block's rows once, a tile's keys each time the block meets it.
#pragma once

#include "cpu/backward/kernel.h"
#include "cpu/panels.h"

namespace forge::cpu::FORGE_TARGET {
namespace {

// Rows lie far apart, where hardware prefetchers do not look.
FORGE_INLINE void prefetch(const Real* row, Int64 n) {
  constexpr Int64 kLine = 64 / sizeof(Real);
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
template <bool Whole>
FORGE_INLINE Vec pack_rows(const BackwardTiling& tiling, const RowGroup& group,
                           const Real* const (&rows)[kLanes], Real* channels, Real* lanes) {
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
template <bool Whole>
FORGE_INLINE Vec dot_pairs(const Real* const (&a)[kLanes], const Real* const (&b)[kLanes],
                           Int64 n) {
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

template <bool Whole>
FORGE_INLINE Vec pack_group(BackwardBlock& block, const RowGroup& group,
                            const Real* const (&q)[kLanes], const Real* const (&dout)[kLanes],
                            const Real* const (&o)[kLanes]) {
  const BackwardTiling& tiling = block.tiling;
  store(block.d_row + group.first, dot_pairs<Whole>(dout, o, tiling.hd));
  return pack_rows<Whole>(tiling, group, q, block.q_rows, block.q_lanes) +
         pack_rows<Whole>(tiling, group, dout, block.dout_rows, block.dout_lanes);
}

// Packs a group of rows; `place` is that of its first and moves to that of the next group.
FORGE_INLINE Vec load_group(const BackwardProblem& problem, BackwardBlock& block,
                            const RowGroup& group, RowCursor& place) {
  const AttnParams& params = problem.params;
  const BackwardArrays<Real>& arrays = problem.arrays;
  const Real *q[kLanes], *dout[kLanes], *o[kLanes];
  Int64 stats_at[kLanes];
  const Int64 present = block.rows - group.first;
  for (int j = 0; j < kLanes; ++j) {
    const Int64 r = group.first + j;
    const bool live = contains(block.live, r);
    stats_at[j] = j < present ? row_index(params, block.b, place.head, place.query) : -1;
    q[j] = live ? arrays.q + element_offset(params.q, block.b, place.query, place.head) : nullptr;
    dout[j] = live ? arrays.dout + element_offset(params.dout, block.b, place.query, place.head)
                   : nullptr;
    o[j] = live ? arrays.o + element_offset(params.o, block.b, place.query, place.head) : nullptr;
    block.row_max[r] = live ? arrays.stats.row_max[stats_at[j]] : 0;
    block.inverse_sum[r] = live ? 1 / arrays.stats.row_sum[stats_at[j]] : 0;
    if (j < present) place.next();
  }
  const bool whole = contains(block.live, group.first) &&
                     contains(block.live, group.first + kLanes - 1) && params.hd % kLanes == 0;
  const Vec zeros = whole ? pack_group<true>(block, group, q, dout, o)
                          : pack_group<false>(block, group, q, dout, o);
  for (int j = 0; j < kLanes && j < present; ++j) {
    Real& d = block.d_row[group.first + j];
    if (arrays.dlse && q[j]) d -= arrays.dlse[stats_at[j]];
  }
  return zeros;
}

FORGE_INLINE void prefetch_row(const BackwardProblem& problem, Int64 b, const RowCursor& place) {
  const AttnParams& params = problem.params;
  prefetch(problem.arrays.q + element_offset(params.q, b, place.query, place.head), params.hd);
  prefetch(problem.arrays.o + element_offset(params.o, b, place.query, place.head), params.hd);
  prefetch(problem.arrays.dout + element_offset(params.dout, b, place.query, place.head),
           params.hd);
}

void load_rows(const BackwardProblem& problem, BackwardBlock& block) {
  const BackwardTiling& tiling = block.tiling;
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
        prefetch_row(problem, block.b, ahead);
        ahead.next();
      }
      zeros = zeros + load_group(problem, block, {first, panel, width, column}, place);
    }
    panel += width;
  }
  block.rows_finite = all_zero(zeros);
  const Int64 elements = block.rows * tiling.channels;
  for (Int64 at = 0; at < elements; at += kLanes) store(block.dq + at, Vec{});
}

FORGE_INLINE Vec pack_key(const BackwardTiling& tiling, const Real* from, Real* to) {
  Vec zeros{};
  for (Int64 at = 0; at < tiling.channels; at += kLanes) {
    const Vec x = load_within(from, at, tiling.hd);
    zeros = fma(x, Vec{}, zeros);
    store(to + at, x);
  }
  return zeros;
}

void load_keys(const BackwardProblem& problem, BackwardBlock& block) {
  const AttnParams& params = problem.params;
  const BackwardTiling& tiling = block.tiling;
  Vec zeros{};
  for (Int64 key = 0; key < block.tile_keys; ++key) {
    const Int64 j = block.tile_begin + key;
    if (j + tiling.keys < params.Tk) {  // of the next tile
      const Int64 next = j + tiling.keys;
      prefetch(problem.arrays.k + element_offset(params.k, block.b, next, block.kv_head),
               params.hd);
      prefetch(problem.arrays.v + element_offset(params.v, block.b, next, block.kv_head),
               params.hd);
    }
    zeros = zeros + pack_key(tiling,
                             problem.arrays.k + element_offset(params.k, block.b, j, block.kv_head),
                             block.k + key * tiling.key_stride);
    pack_key(tiling, problem.arrays.v + element_offset(params.v, block.b, j, block.kv_head),
             block.v + key * tiling.key_stride);
  }
  block.keys_finite = all_zero(zeros);
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

// The finished dq to its place: the partial sums [count][rows][channels] added up in this order.
void store_dq(const BackwardProblem& problem, const BackwardBlock& block, const Real* partial,
              Int64 count) {
  const AttnParams& params = problem.params;
  const BackwardTiling& tiling = block.tiling;
  const Vec scale = broadcast(params.scale);
  RowCursor place = row_cursor(params, block.kv_head, block.row_begin);
  for (Int64 r = 0; r < block.rows; ++r, place.next()) {
    Real* to = problem.arrays.dq + element_offset(params.dq, block.b, place.query, place.head);
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

}  // namespace
}  // namespace forge::cpu::FORGE_TARGET
