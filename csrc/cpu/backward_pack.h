// Packing for the backward: a block's rows once, a tile's keys each time the block meets it.
#pragma once

#include "cpu/backward_kernels.h"
#include "cpu/panels.h"

namespace forge::cpu::FORGE_TARGET {
namespace {

// Where a row of a kv head stands in the arrays; next() walks through the rows.
struct RowPlace {
  Int64 i;  // query
  Int64 h;  // query head
  Int64 first_head;
  Int64 rep;

  FORGE_MEMBER void next() {
    if (++h < first_head + rep) return;
    h = first_head;
    ++i;
  }
};

FORGE_INLINE RowPlace row_place(const AttnParams& params, Int64 kv_head, Int64 row) {
  const Int64 rep = params.H / params.Hkv;
  return {row / rep, kv_head * rep + row % rep, kv_head * rep, rep};
}

// Rows lie far apart, where hardware prefetchers do not look.
FORGE_INLINE void prefetch(const Real* row, Int64 n) {
  constexpr Int64 kLine = 64 / sizeof(Real);
  for (Int64 at = 0; at < n; at += kLine) __builtin_prefetch(row + at);
}

// A row of hd elements into the panels of channels; zeros for a null row. Returns NaN lanes where
// an element is not finite, else zeros.
FORGE_INLINE Vec pack_channels(const BackwardTiling& tiling, const Real* from, Real* panels,
                               Int64 row) {
  const Int64 vecs = tiling.channels / kLanes;
  Vec zeros{};
  for (Int64 at = 0; at < vecs;) {
    const int width = panel_vecs(at, vecs, kChannelVecs);
    Real* to = panels + (at * tiling.rows + row * width) * kLanes;
    for (int v = 0; v < width; ++v) {
      const Vec x = from ? load_within(from, (at + v) * kLanes, tiling.hd) : Vec{};
      zeros = fma(x, Vec{}, zeros);
      store(to + v * kLanes, x);
    }
    at += width;
  }
  return zeros;
}

// The same rows with rows in lanes: [panel of rows][hd][rows of the panel].
FORGE_INLINE void pack_lanes(const BackwardTiling& tiling, Int64 row_vecs, const Real* panels,
                             Real* lanes) {
  const Int64 vecs = tiling.channels / kLanes;
  for (Int64 row_at = 0; row_at < row_vecs;) {
    const int row_width = panel_vecs(row_at, row_vecs, kRowVecs);
    Real* to = lanes + row_at * kLanes * tiling.hd;
    for (Int64 at = 0; at < vecs;) {
      const int width = panel_vecs(at, vecs, kChannelVecs);
      const Real* panel = panels + at * tiling.rows * kLanes;
      for (int rv = 0; rv < row_width; ++rv) {
        for (int v = 0; v < width; ++v) {
          const Int64 row = (row_at + rv) * kLanes;
          Vec block[kLanes];
          FORGE_UNROLL
          for (int j = 0; j < kLanes; ++j)
            block[j] = load(panel + ((row + j) * width + v) * kLanes);
          transpose(block);
          const Int64 d = (at + v) * kLanes;
          Real* column = to + (d * row_width + rv) * kLanes;
          if (d + kLanes <= tiling.hd) {
            FORGE_UNROLL
            for (int j = 0; j < kLanes; ++j) store(column + j * row_width * kLanes, block[j]);
          } else {
            for (int j = 0; j < tiling.hd - d; ++j)
              store(column + j * row_width * kLanes, block[j]);
          }
        }
      }
      at += width;
    }
    row_at += row_width;
  }
}

FORGE_INLINE Real dot(const Real* a, const Real* b, Int64 n) {
  Vec acc{};
  for (Int64 at = 0; at < n; at += kLanes)
    acc = fma(load_within(a, at, n), load_within(b, at, n), acc);
  return sum_of_lanes(acc);
}

FORGE_INLINE bool all_zero(Vec zeros) { return !any(zeros != Vec{}); }

FORGE_INLINE void load_row(const BackwardProblem& problem, BackwardBlock& block, Int64 r,
                           const RowPlace& place, bool write_d_row, Vec& zeros) {
  const AttnParams& params = problem.params;
  const BackwardArrays<Real>& arrays = problem.arrays;
  const Int64 at = row_index(params, block.b, place.h, place.i);
  if (r < block.live_begin || r >= block.live_end) {
    pack_channels(block.tiling, nullptr, block.q_rows, r);
    pack_channels(block.tiling, nullptr, block.dout_rows, r);
    block.row_max[r] = block.inverse_sum[r] = block.d_row[r] = 0;
    if (write_d_row) arrays.d_row[at] = 0;
    return;
  }
  const Real* q = arrays.q + element_offset(params.q, block.b, place.i, place.h);
  const Real* o = arrays.o + element_offset(params.o, block.b, place.i, place.h);
  const Real* dout = arrays.dout + element_offset(params.dout, block.b, place.i, place.h);
  zeros = zeros + pack_channels(block.tiling, q, block.q_rows, r);
  zeros = zeros + pack_channels(block.tiling, dout, block.dout_rows, r);
  Real d = dot(dout, o, params.hd);
  if (arrays.dlse) d -= arrays.dlse[at];
  block.d_row[r] = d;
  if (write_d_row) arrays.d_row[at] = d;
  block.row_max[r] = arrays.stats.row_max[at];
  block.inverse_sum[r] = 1 / arrays.stats.row_sum[at];
}

FORGE_INLINE void prefetch_row(const BackwardProblem& problem, Int64 b, const RowPlace& place) {
  const AttnParams& params = problem.params;
  prefetch(problem.arrays.q + element_offset(params.q, b, place.i, place.h), params.hd);
  prefetch(problem.arrays.o + element_offset(params.o, b, place.i, place.h), params.hd);
  prefetch(problem.arrays.dout + element_offset(params.dout, b, place.i, place.h), params.hd);
}

void load_rows(const BackwardProblem& problem, BackwardBlock& block, bool write_d_row) {
  constexpr Int64 kAhead = 8;
  const BackwardTiling& tiling = block.tiling;
  Vec zeros{};
  RowPlace place = row_place(problem.params, block.kv_head, block.row_begin);
  RowPlace ahead = row_place(problem.params, block.kv_head, block.row_begin + kAhead);
  for (Int64 r = 0; r < block.rows; ++r) {
    if (r + kAhead < block.rows) prefetch_row(problem, block.b, ahead);
    load_row(problem, block, r, place, write_d_row, zeros);
    place.next();
    ahead.next();
  }
  block.rows_finite = all_zero(zeros);
  const Int64 row_vecs = (block.rows + kLanes - 1) / kLanes;
  for (Int64 r = block.rows; r < row_vecs * kLanes; ++r) {  // padding
    pack_channels(tiling, nullptr, block.q_rows, r);
    pack_channels(tiling, nullptr, block.dout_rows, r);
    block.row_max[r] = block.inverse_sum[r] = block.d_row[r] = 0;
  }
  pack_lanes(tiling, row_vecs, block.q_rows, block.q_lanes);
  pack_lanes(tiling, row_vecs, block.dout_rows, block.dout_lanes);
  for (Int64 at = 0; at < block.rows * tiling.channels; at += kLanes) store(block.dq + at, Vec{});
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

// A key counted from the tile's first, held within [-1, tile + 1) so that it fits a lane.
FORGE_INLINE Int32 key_in_tile(const BackwardBlock& block, Int64 key) {
  const Int64 at = key - block.tile_begin;
  return static_cast<Int32>(at < 0 ? -1 : at < block.tile_keys ? at : block.tile_keys);
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
  const bool padded = block.rows % kLanes != 0 || block.live_end - block.live_begin != block.rows;
  const bool whole = block.whole_begin <= block.tile_begin &&
                     block.tile_begin + block.tile_keys <= block.whole_end;
  // Rows that count for nothing give zeros without a mask, unless a key makes NaN of them.
  block.edge = !whole || (padded && !block.keys_finite);
  if (!block.edge) return;
  const Int64 row_vecs = (block.rows + kLanes - 1) / kLanes;
  for (Int64 r = 0; r < row_vecs * kLanes; ++r) {
    // Both ends stay ascending over the rows: those before the live ones see keys before any, those
    // after them keys after any.
    const bool before = r < block.live_begin, after = r >= block.live_end;
    block.lo[r] = before ? -1 : after ? INT32_MAX : key_in_tile(block, block.first_key[r]);
    block.hi[r] = before ? -1 : after ? INT32_MAX : key_in_tile(block, block.last_key[r]);
  }
}

// The finished dq to its place: the partial sums [count][rows][channels] added up in this order.
void store_dq(const BackwardProblem& problem, const BackwardBlock& block, const Real* partial,
              Int64 count) {
  const AttnParams& params = problem.params;
  const BackwardTiling& tiling = block.tiling;
  const Vec scale = broadcast(params.scale);
  RowPlace place = row_place(params, block.kv_head, block.row_begin);
  for (Int64 r = 0; r < block.rows; ++r, place.next()) {
    Real* to = problem.arrays.dq + element_offset(params.dq, block.b, place.i, place.h);
    const bool live = r >= block.live_begin && r < block.live_end;
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
