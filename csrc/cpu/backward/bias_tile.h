// The gradient of a bias, tile by tile, from ds as [key][row].
#pragma once

#include "cpu/backward/kernel.h"
#include "cpu/stored.h"

namespace forge::cpu::FORGE_TARGET {
namespace {

// Transposed: lane j of x[l] is what key + j gives lane l. load_key(key): a vector of it.
template <typename LoadKey>
FORGE_INLINE void keys_to_lanes(Int64 key, Int64 keys, const LoadKey& load_key, Vec (&x)[kLanes]) {
  FORGE_UNROLL
  for (int j = 0; j < kLanes; ++j) x[j] = key + j < keys ? load_key(key + j) : Vec{};
  transpose(x);
}

// Adds a vector of keys, those below `keys`.
FORGE_INLINE void add_keys(Real* row, Int64 key, Int64 keys, Vec x) {
  store_within(row, key, keys, load_within(row, key, keys) + x);
}

FORGE_INLINE Real* bias_row(const BiasSum& sum, const BackwardBlock& block, Int64 head,
                            Int64 query) {
  return sum.data + block.b * sum.strides[0] + head * sum.strides[1] + query * sum.strides[2] +
         block.tile_begin;
}

// Sums over the rows of each head. The vectors whose lanes hold the same heads come together first.
void add_columns(const BackwardProblem& problem, const BackwardBlock& block) {
  const Int64 rep = group_size(problem.params), vecs = ceil_div(block.rows, kLanes);
  Int64 period = 1;  // in vectors
  while (period < vecs && period * kLanes % rep != 0) ++period;
  for (Int64 key = 0; key < block.tile_keys; key += kLanes) {
    for (Int64 first = 0; first < period; ++first) {
      Vec x[kLanes];
      const auto load_key = [&](Int64 at) {
        const Real* row = block.bias_ds + at * block.tiling.pair_stride;
        Vec sum{};
        for (Int64 n = first; n < vecs; n += period) sum = sum + load(row + n * kLanes);
        return sum;
      };
      keys_to_lanes(key, block.tile_keys, load_key, x);
      RowCursor at = row_cursor(problem.params, block.kv_head, block.row_begin + first * kLanes);
      for (int l = 0; l < kLanes && first * kLanes + l < block.rows; ++l, at.next()) {
        Real* column = bias_row(problem.bias, block, at.head, 0);
        add_keys(column, key, block.tile_keys, x[l]);
      }
    }
  }
}

// Sums over the keys of each row.
void add_rows(const BackwardBlock& block) {
  for (Int64 row = 0; row < block.rows; row += kLanes) {
    Vec sum{};
    for (Int64 key = 0; key < block.tile_keys; ++key) {
      sum = sum + load(block.bias_ds + key * block.tiling.pair_stride + row);
    }
    store(block.row_sums + row, load(block.row_sums + row) + sum);
  }
}

// No sum, but over heads and sequences that share a row: these come one after the other.
void add_pairs(const BackwardProblem& problem, const BackwardBlock& block) {
  RowCursor at = row_cursor(problem.params, block.kv_head, block.row_begin);
  for (Int64 first = 0; first < block.rows; first += kLanes) {
    Real* rows[kLanes] = {};  // null where nothing is seen
    for (int l = 0; l < kLanes && first + l < block.rows; ++l, at.next()) {
      const Int64 r = first + l;
      const bool seen = block.edge ? block.seen_from[r] < block.seen_to[r] : is_live(block, r);
      if (seen) rows[l] = bias_row(problem.bias, block, at.head, at.query);
    }
    for (Int64 key = 0; key < block.tile_keys; key += kLanes) {
      Vec x[kLanes];
      const auto load_key = [&](Int64 j) {
        return load(block.bias_ds + j * block.tiling.pair_stride + first);
      };
      keys_to_lanes(key, block.tile_keys, load_key, x);
      for (int l = 0; l < kLanes; ++l) {
        if (rows[l]) add_keys(rows[l], key, block.tile_keys, x[l]);
      }
    }
  }
}

void bias_gradients(const BackwardProblem& problem, const BackwardBlock& block) {
  switch (problem.bias.axes) {
    case BiasAxes::kColumns:
      return add_columns(problem, block);
    case BiasAxes::kRows:
      return add_rows(block);
    case BiasAxes::kPairs:
      return add_pairs(problem, block);
    case BiasAxes::kNone:
      return;
  }
}

}  // namespace
}  // namespace forge::cpu::FORGE_TARGET
