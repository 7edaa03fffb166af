// How the backward cuts a call up: blocks of rows, tiles of keys, splits of these; and which blocks
// see which tiles.
#pragma once

#include <algorithm>
#include <vector>

#include "core/sequence_mask.h"
#include "core/thread_pool.h"
#include "cpu/arena.h"
#include "cpu/backward/kernel.h"
#include "cpu/splits.h"

namespace forge::cpu {

// Which optional parts of a call take scratch, or bear upon the plan.
struct PlanOptions {
  bool pairs;  // bias or mask
  BiasAxes dbias;
  bool whole_queries;  // a query's rows, of all heads of the group, are of one block
};

// What decides the order of a sum follows from the head sizes, the target and the rows and keys of
// one kv head, never from the batch, the other kv heads or the number of threads.
struct Plan {
  BackwardTiling tiling;
  Int64 lanes;
  Int64 tile_rows;   // of the widest register tile
  Int64 rows;        // of a block
  Int64 group_rows;  // rows of a kv head: Tq * rep
  Int64 groups;      // B * Hkv
  Int64 blocks;      // of a kv head
  Int64 tiles;       // of its keys
  Int64 splits;      // of the keys at most, if blocks is 1: each has a dq of its own
  bool shares;       // a task for each split; else for each kv head: the sums are the same
  PlanOptions options;
  bool has_slope;  // the score map

  IndexRange rows_of_block(Int64 index) const {
    return {index * rows, std::min((index + 1) * rows, group_rows)};
  }
};

// Rows of a block: many, so that keys and their gradients stream past few times, but few enough for
// the packed rows to stay in the second-level cache.
inline Int64 block_rows(const AttnParams& params, bool whole_queries) {
  const Int64 floats = 3 * params.hd + 2 * params.hv;  // of a packed row
  const Int64 most = floats <= 5 * 128 ? kMostRows : kMostRows / 2, rep = group_size(params);
  return whole_queries ? std::max(rep, most / rep * rep) : most;
}

inline Plan make_plan(const AttnParams& params, const BackwardKernels& kernels,
                      const PlanOptions& options) {
  constexpr Int64 kTileKeys = 48, kLine = 16;  // a cache line holds 16 floats
  Plan plan{};
  plan.lanes = kernels.lanes;
  plan.tile_rows = kernels.tile_rows;
  plan.group_rows = rows_of_group(params);
  plan.groups = kv_heads(params);
  BackwardTiling& tiling = plan.tiling;
  tiling.hd = params.hd;
  tiling.hv = params.hv;
  tiling.channels = round_up(params.hd, plan.lanes);
  tiling.value_channels = round_up(params.hv, plan.lanes);
  plan.rows = std::min(block_rows(params, options.whole_queries), plan.group_rows);
  tiling.rows = round_up(plan.rows, plan.lanes);
  tiling.keys = std::clamp<Int64>(params.Tk, 1, kTileKeys);
  // An odd number of cache lines, so that a column of keys falls into different sets.
  const auto odd_lines = [](Int64 floats) { return (ceil_div(floats, kLine) | 1) * kLine; };
  tiling.key_stride = odd_lines(tiling.channels);
  tiling.value_stride = odd_lines(tiling.value_channels);
  tiling.pair_stride = odd_lines(tiling.rows + plan.tile_rows);
  plan.blocks = ceil_div(plan.group_rows, plan.rows);
  plan.tiles = ceil_div(params.Tk, tiling.keys);
  plan.splits = 1;
  plan.options = options;
  plan.has_slope = params.softcap > 0;
  return plan;
}

// Tiles of a split of keys that some row of a kv head sees: they begin at multiples of it.
inline Int64 split_tiles(IndexRange tiles) {
  constexpr Int64 kLeastTiles = 6, kMostSplits = 16;
  Int64 size = kLeastTiles;
  while (ceil_div(tiles.end, size) - tiles.begin / size > kMostSplits) size *= 2;
  return size;
}

// The splits that those tiles are in.
inline IndexRange splits_of(IndexRange tiles) {
  if (is_empty(tiles)) return nothing();
  const Int64 size = split_tiles(tiles);
  return {tiles.begin / size, ceil_div(tiles.end, size)};
}

// The tiles that each block of each sequence takes part in: from the first to the last that its
// rows see.
class BlockTiles {
 public:
  BlockTiles(const AttnParams& params, const AttnRange* ranges, const Plan& plan)
      : blocks_(plan.blocks), of_(static_cast<std::size_t>(params.B * plan.blocks)) {
    for (Int64 b = 0; b < params.B; ++b) {
      const SequenceMask mask(params, ranges, b);
      IndexRange later = nothing();
      for (Int64 index = plan.blocks - 1; index >= 0; --index) {
        Entry& entry = of_[static_cast<std::size_t>(b * blocks_ + index)];
        entry.own = tiles_of(plan.tiling, keys_of(params, mask, plan.rows_of_block(index)));
        entry.later = later;
        later = hull(later, entry.own);
      }
    }
  }

  IndexRange of(Int64 b, Int64 index) const { return entry(b, index).own; }

  // The next higher block that takes part in a tile, or -1.
  Int64 before(Int64 b, Int64 index, Int64 tile) const {
    if (!contains(entry(b, index).later, tile)) return -1;
    do {
      ++index;
    } while (index < blocks_ && !contains(of(b, index), tile));
    return index < blocks_ ? index : -1;
  }

 private:
  struct Entry {
    IndexRange own;
    IndexRange later;  // of all higher blocks
  };

  // Between the first and the last that some of the rows see.
  static IndexRange keys_of(const AttnParams& params, const SequenceMask& mask, IndexRange rows) {
    IndexRange keys = nothing();
    const Int64 last = query_of_row(params, rows.end - 1);
    for (Int64 i = query_of_row(params, rows.begin); i <= last; ++i)
      keys = hull(keys, mask.keys(i));
    return keys;
  }
  static IndexRange tiles_of(const BackwardTiling& tiling, IndexRange keys) {
    if (is_empty(keys)) return nothing();
    return {keys.begin / tiling.keys, ceil_div(keys.end, tiling.keys)};
  }
  const Entry& entry(Int64 b, Int64 index) const {
    return of_[static_cast<std::size_t>(b * blocks_ + index)];
  }

  const Int64 blocks_;
  std::vector<Entry> of_;  // [B][blocks]
};

// With a single block the keys are cut into splits.
inline void plan_splits(Plan& plan, const BlockTiles& tiles, Int64 B, int threads) {
  if (plan.blocks > 1) return;
  for (Int64 b = 0; b < B; ++b) {
    const IndexRange splits = splits_of(tiles.of(b, 0));
    plan.splits = std::max(plan.splits, splits.end - splits.begin);
  }
  // Sums of dbias over keys run through the splits.
  const bool may_share = plan.options.dbias != BiasAxes::kRows;
  plan.shares = may_share && plan.splits > 1 && plan.groups < wanted_tasks(threads);
}

// Lays a block out from base on; returns the bytes it takes.
inline Int64 lay_out(const Plan& plan, char* base, BackwardBlock& block) {
  const BackwardTiling& tiling = plan.tiling;
  block.tiling = tiling;
  Arena arena(base);
  block.q_lanes = arena.take<float>(tiling.rows * tiling.hd);
  block.dout_lanes = arena.take<float>(tiling.rows * tiling.hv);
  block.q_rows = arena.take<float>(tiling.rows * tiling.channels);
  block.dout_rows = arena.take<float>(tiling.rows * tiling.value_channels);
  block.dq = arena.take<float>(tiling.rows * tiling.channels);
  for (float** piece : {&block.row_max, &block.inverse_sum, &block.d_row}) {
    *piece = arena.take<float>(tiling.rows);
  }
  block.seen = arena.take<IndexRange>(tiling.rows);
  for (Int32** piece : {&block.seen_from, &block.seen_to}) *piece = arena.take<Int32>(tiling.rows);
  for (Int32** piece : {&block.rows_from, &block.rows_to}) *piece = arena.take<Int32>(tiling.keys);
  const Int64 keys = tiling.keys + plan.tile_rows;
  block.k = arena.take<float>(keys * tiling.key_stride);
  block.v = arena.take<float>(keys * tiling.value_stride);
  for (float** piece : {&block.p, &block.ds, &block.slope}) {
    *piece = arena.take<float>(keys * tiling.pair_stride);
  }
  if (plan.options.pairs) {
    block.pairs = arena.take<PairRow>(tiling.rows);
    block.bias_room = arena.take<float>(keys * tiling.pair_stride);
  }
  if (plan.options.dbias != BiasAxes::kNone) {
    block.row_sums = arena.take<float>(tiling.rows);
    block.bias_ds = plan.has_slope ? arena.take<float>(keys * tiling.pair_stride) : block.ds;
  }
  return arena.used();
}

}  // namespace forge::cpu
