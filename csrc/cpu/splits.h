// The forward's key tiles shared out among tasks, which leave the parts of their rows (key_tiles.h)
// to be merged afterwards: what the schedules of many rows and of few have in common. Who makes a
// part changes no bit of it, so there are as many tasks as the threads want.
#pragma once

#include <vector>

#include "core/thread_pool.h"
#include "cpu/kernel_tables.h"

namespace forge::cpu {

constexpr Int64 kMostPartFloats = Int64{1} << 20;  // 4 MiB

// A call, as the schedules see it.
struct Forward {
  const Problem& problem;
  ForwardCall call;
  KernelTables kernels;
  Int64 rows;                    // a kv head: rep * Tq
  Int64 heads;                   // B * Hkv
  std::vector<IndexRange> keys;  // from the first to the last that some query of a sequence sees

  SequenceMask mask(Int64 b) const { return SequenceMask(call.params, problem.ranges.data(), b); }
  Int64 tile_keys() const { return kernels.forward.tile_keys(widest_head(call.params)); }
  // Tiles of keys that some query of sequence b may see.
  IndexRange tiles(Int64 b) const;
  Int64 row_floats() const { return part_floats(call.params.hv); }
};

struct SplitPlan {
  Int64 sequences;  // at a time
  Int64 tiles;      // of a sequence at a time: a round
  Int64 splits;     // tasks among which these are shared out; 1: there is one round, and its tasks
                    // merge their parts as they go
  Int64 floats;     // of all rows of a sequence

  // A sequence holds its totals, then a round's parts.
  Int64 parts() const { return splits == 1 ? 1 : tiles; }
  Int64 floats_in_all() const { return sequences * (1 + parts()) * floats; }
};

// Tasks that keep so many threads busy to the end.
inline Int64 wanted_tasks(int threads) {
  return threads == 1 ? 1 : larger(smaller(32, 4 * threads), 2 * threads);
}

// For `tasks` tasks, of which each split of a sequence makes `shares`; a split has least_tiles or
// more.
SplitPlan plan_splits(const Forward& forward, Int64 tasks, Int64 shares, Int64 least_tiles);

// A task's tiles, and the places of the sequence's rows: row 0 of kv head 0.
struct KeySplit {
  Int64 b;
  IndexRange tiles;
  Parts parts;
  float* totals;  // null: parts are left
};

// What holds for a while: some sequences, and a round of their tiles, counted from each one's
// first.
struct SplitRound {
  const SplitPlan& plan;
  float* memory;
  IndexRange sequences;
  IndexRange tiles;
  bool last;

  float* totals(Int64 b) const {
    return memory + (b - sequences.begin) * (1 + plan.parts()) * plan.floats;
  }
  float* parts(Int64 b) const { return totals(b) + plan.floats; }
  // Of sequence b, counted from key 0.
  IndexRange tiles_of(const Forward& forward, Int64 b) const;
  KeySplit split(const Forward& forward, Int64 b, Int64 index) const;
};

// Merges the parts of a round; after the last one, finishes and stores the rows.
void merge_round(const Forward& forward, const SplitRound& round);

// body(split, share, worker) for all splits of all sequences and all shares; floats_in_all() floats
// at memory.
template <typename Body>
void run_splits(const Forward& forward, const SplitPlan& plan, Int64 shares, float* memory,
                int threads, const Body& body) {
  const Int64 B = forward.call.params.B;
  for (Int64 b = 0; b < B; b += plan.sequences) {
    SplitRound round = {plan, memory, {b, smaller(B, b + plan.sequences)}, {0, 0}, false};
    Int64 tiles = 1;  // of the longest
    for (Int64 at = b; at < round.sequences.end; ++at) {
      const IndexRange seen = forward.tiles(at);
      tiles = larger(tiles, seen.end - seen.begin);
    }
    for (Int64 first = 0; first < tiles; first += plan.tiles) {
      round.tiles = {first, smaller(tiles, first + plan.tiles)};
      round.last = round.tiles.end == tiles;
      const Int64 splits = (round.sequences.end - b) * plan.splits;
      parallel_for(splits * shares, threads, [&](std::int64_t index, int worker) {
        const Int64 split = index / shares;
        body(round.split(forward, b + split / plan.splits, split % plan.splits), index % shares,
             worker);
      });
      merge_round(forward, round);
    }
  }
}

// The schedule of few rows a kv head (decode/schedule.cpp).
void run_decode(const Forward& forward);

}  // namespace forge::cpu
