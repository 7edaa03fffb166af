// The schedule of the backward.
//
// A task is a block of rows of one kv head; it walks over the tiles of keys that its rows see, in
// ascending order. dq is private to it. A tile of dk and dv is added to by the blocks that see it
// in descending order of their rows, each waiting for its predecessor: tasks start in that order,
// so a predecessor is always running or done, and it is usually a tile ahead. So there are no
// copies of dk and dv to add up, and no sum depends on which thread did what. With a single block
// (short queries) the keys are cut into splits instead, each with a dq of its own, which are added
// up in order.
#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "core/stop.h"
#include "core/thread_pool.h"
#include "core/zero_fill.h"
#include "cpu/arena.h"
#include "cpu/attention.h"
#include "cpu/backward/block_queue.h"
#include "cpu/backward/key_sums.h"
#include "cpu/scratch.h"
#include "cpu/splits.h"

namespace forge::cpu {

namespace {

// What decides the order of a sum follows from the head size, the target and the rows and keys of
// one kv head, never from the batch, the other kv heads or the number of threads.
struct Plan {
  BackwardTiling tiling;
  Int64 lanes;
  Int64 tile_rows;   // of the widest register tile
  Int64 group_rows;  // rows of a kv head: Tq * rep
  Int64 groups;      // B * Hkv
  Int64 blocks;      // of a kv head
  Int64 tiles;       // of its keys
  Int64 splits;      // of the keys at most, if blocks is 1: each has a dq of its own
  bool shares;       // a task for each split; else for each kv head: the sums are the same
};

// Rows of a block: many, so that keys and their gradients stream past few times, but few enough for
// the packed rows (five times rows * hd) to stay in the second-level cache.
Int64 block_rows(const Plan& plan, Int64 hd) {
  const Int64 most = hd <= 128 ? 192 : 96;
  return std::min(most, round_up(plan.group_rows, plan.lanes));
}

// Tiles of a split of keys that some row of a kv head sees: they begin at multiples of it.
Int64 split_tiles(IndexRange tiles) {
  constexpr Int64 kLeastTiles = 6, kMostSplits = 16;
  Int64 size = kLeastTiles;
  while (ceil_div(tiles.end, size) - tiles.begin / size > kMostSplits) size *= 2;
  return size;
}

// The tiles that hold some keys.
IndexRange tiles_of(const BackwardTiling& tiling, IndexRange keys) {
  if (is_empty(keys)) return nothing();
  return {keys.begin / tiling.keys, ceil_div(keys.end, tiling.keys)};
}

// The splits that those tiles are in.
IndexRange splits_of(IndexRange tiles) {
  if (is_empty(tiles)) return nothing();
  const Int64 size = split_tiles(tiles);
  return {tiles.begin / size, ceil_div(tiles.end, size)};
}

Int64 most_splits(const BackwardProblem& problem, const Plan& plan) {
  const AttnParams& params = problem.params;
  Int64 most = 1;
  for (Int64 b = 0; b < params.B; ++b) {
    const AttnBand band = attn_band(params, problem.ranges[b]);
    const IndexRange splits =
        splits_of(tiles_of(plan.tiling, keys_of_rows(params, band, {0, plan.group_rows})));
    most = std::max(most, splits.end - splits.begin);
  }
  return most;
}

Plan make_plan(const BackwardProblem& problem, const BackwardKernels& kernels, int threads) {
  constexpr Int64 kTileKeys = 48, kLine = 16;  // a cache line holds 16 floats
  const AttnParams& params = problem.params;
  Plan plan{};
  plan.lanes = kernels.lanes;
  plan.tile_rows = kernels.tile_rows;
  plan.group_rows = rows_of_group(params);
  plan.groups = kv_heads(params);
  BackwardTiling& tiling = plan.tiling;
  tiling.hd = params.hd;
  tiling.channels = round_up(params.hd, plan.lanes);
  tiling.rows = std::max(plan.lanes, block_rows(plan, params.hd));
  tiling.keys = std::clamp<Int64>(params.Tk, 1, kTileKeys);
  // An odd number of cache lines, so that a column of keys falls into different sets.
  tiling.key_stride = (ceil_div(tiling.channels, kLine) | 1) * kLine;
  tiling.pair_stride = (ceil_div(tiling.rows + plan.tile_rows, kLine) | 1) * kLine;
  plan.blocks = ceil_div(plan.group_rows, tiling.rows);
  plan.tiles = ceil_div(params.Tk, tiling.keys);
  plan.splits = plan.blocks == 1 ? most_splits(problem, plan) : 1;
  plan.shares = plan.splits > 1 && plan.groups < wanted_tasks(threads);
  return plan;
}

// Lays a block out from base on; returns the bytes it takes.
Int64 lay_out(const Plan& plan, char* base, BackwardBlock& block) {
  const BackwardTiling& tiling = plan.tiling;
  block.tiling = tiling;
  Arena arena(base);
  for (float** piece : {&block.q_lanes, &block.dout_lanes}) {
    *piece = arena.take<float>(tiling.rows * tiling.hd);
  }
  for (float** piece : {&block.q_rows, &block.dout_rows, &block.dq}) {
    *piece = arena.take<float>(tiling.rows * tiling.channels);
  }
  for (float** piece : {&block.row_max, &block.inverse_sum, &block.d_row}) {
    *piece = arena.take<float>(tiling.rows);
  }
  block.seen = arena.take<IndexRange>(tiling.rows);
  for (Int32** piece : {&block.seen_from, &block.seen_to}) *piece = arena.take<Int32>(tiling.rows);
  const Int64 keys = tiling.keys + plan.tile_rows;
  for (float** piece : {&block.k, &block.v}) *piece = arena.take<float>(keys * tiling.key_stride);
  for (float** piece : {&block.p, &block.ds, &block.slope}) {
    *piece = arena.take<float>(keys * tiling.pair_stride);
  }
  return arena.used();
}

// Which keys the block's rows see, alone and together.
void find_keys(const BackwardProblem& problem, BackwardBlock& block) {
  const AttnParams& params = problem.params;
  const AttnBand band = attn_band(params, problem.ranges[block.b]);
  block.live = block.any = nothing();
  block.all = {0, params.Tk};
  RowCursor at = row_cursor(params, block.kv_head, block.row_begin);
  for (Int64 r = 0; r < block.rows; ++r, at.next()) {
    const IndexRange keys = visible_keys(band, at.query);
    block.seen[r] = keys;
    if (is_empty(keys)) continue;
    block.live = hull(block.live, {r, r + 1});
    block.any = hull(block.any, keys);
    block.all = overlap(block.all, keys);
  }
}

class Backward {
 public:
  Backward(const BackwardProblem& problem, const BackwardKernels& kernels)
      : problem_(problem),
        kernels_(kernels),
        threads_(num_threads()),
        plan_(make_plan(problem, kernels, threads_)),
        workers_(static_cast<std::size_t>(worker_count())),
        queue_(plan_.groups, plan_.blocks, workers_.size()),
        turns_(static_cast<std::size_t>(plan_.groups * plan_.tiles)),
        scratch_(static_cast<std::size_t>(worker_count() * block_bytes() + partial_bytes() +
                                          key_sum_bytes(problem, problem.arrays.dk) +
                                          key_sum_bytes(problem, problem.arrays.dv))) {
    for (std::size_t w = 0; w < workers_.size(); ++w) {
      lay_out(plan_, scratch_.data() + static_cast<Int64>(w) * block_bytes(), workers_[w]);
    }
    char* rest = scratch_.data() + worker_count() * block_bytes();
    partial_dq_ = reinterpret_cast<float*>(rest);
    rest += partial_bytes();
    problem_.dk = key_sum_of(problem, problem.arrays.dk, rest);
    problem_.dv =
        key_sum_of(problem, problem.arrays.dv, rest + key_sum_bytes(problem, problem.arrays.dk));
    for (std::atomic<Int32>& turn : turns_) turn.store(-1, std::memory_order_relaxed);
  }

  void run() {
    clear_unseen(problem_.dk);
    clear_unseen(problem_.dv);
    if (plan_.splits > 1) {
      run_splits();
    } else {
      run_blocks();
    }
    round_key_sum(problem_, kernels_, problem_.arrays.dk, problem_.dk);
    round_key_sum(problem_, kernels_, problem_.arrays.dv, problem_.dv);
  }

 private:
  void run_blocks() {
    parallel_for(plan_.groups * plan_.blocks, threads_, [&](std::int64_t, int worker) {
      const BlockQueue::Item item = queue_.take(worker);
      BackwardBlock& block = workers_[static_cast<std::size_t>(worker)];
      open(block, item.group, item.block);
      kernels_.load_rows(problem_, block);
      walk(block, item.group, tiles_of(plan_.tiling, block.any));
      kernels_.store_dq(problem_, block, block.dq, 1);
    });
  }

  Int64 worker_count() const {
    const Int64 tasks = plan_.shares ? plan_.splits : plan_.blocks;
    return std::min<Int64>(threads_, plan_.groups * tasks);
  }
  // 64 bytes more than whole pages: workers' scratch then starts in different cache sets.
  Int64 block_bytes() const {
    BackwardBlock sizing{};
    return round_up(lay_out(plan_, nullptr, sizing), 4096) + 64;
  }
  Int64 partial_bytes() const {
    if (plan_.splits == 1) return 0;
    const Int64 places = plan_.shares ? plan_.groups : worker_count();
    return places * plan_.splits * split_elements() * static_cast<Int64>(sizeof(float));
  }
  Int64 split_elements() const { return plan_.group_rows * plan_.tiling.channels; }

  void open(BackwardBlock& block, Int64 group, Int64 index) const {
    const KvHead head = kv_head_at(problem_.params, group);
    const IndexRange rows = rows_of_block(index);
    block.b = head.b;
    block.kv_head = head.head;
    block.row_begin = rows.begin;
    block.rows = rows.end - rows.begin;
    find_keys(problem_, block);
  }

  IndexRange rows_of_block(Int64 index) const {
    return {index * plan_.tiling.rows, std::min((index + 1) * plan_.tiling.rows, plan_.group_rows)};
  }

  // Tiles that some row of a block sees, without a block at hand.
  IndexRange tiles_of_block(Int64 b, Int64 index) const {
    const AttnParams& params = problem_.params;
    return tiles_of(plan_.tiling, keys_of_rows(params, attn_band(params, problem_.ranges[b]),
                                               rows_of_block(index)));
  }

  void walk(BackwardBlock& block, Int64 group, IndexRange tiles) {
    std::fill_n(block.dq, block.rows * plan_.tiling.channels, 0.0f);
    const Int64 index = block.row_begin / plan_.tiling.rows;
    IndexRange before = nothing();
    if (index + 1 < plan_.blocks) before = tiles_of_block(block.b, index + 1);
    for (Int64 tile = tiles.begin; tile < tiles.end; ++tile) {
      if (stop_requested()) return;
      block.tile_begin = tile * plan_.tiling.keys;
      block.tile_keys = std::min(plan_.tiling.keys, problem_.params.Tk - block.tile_begin);
      kernels_.load_keys(problem_, block);
      kernels_.scores(problem_, block);
      std::atomic<Int32>& turn = turns_[static_cast<std::size_t>(group * plan_.tiles + tile)];
      const bool follows = contains(before, tile);
      if (follows && !wait_for(turn, static_cast<Int32>(index + 1))) return;
      kernels_.key_gradients(problem_, block, follows);
      turn.store(static_cast<Int32>(index), std::memory_order_release);
      kernels_.row_gradients(block);
    }
  }

  // False where the call is interrupted: then the turn may never come.
  static bool wait_for(const std::atomic<Int32>& turn, Int32 index) {
    for (int spins = 0; turn.load(std::memory_order_acquire) != index; ++spins) {
      if (spins < 2000) continue;
      if (stop_requested()) return false;
      std::this_thread::yield();
    }
    return true;
  }

  // One block, its keys in splits, each with a dq of its own; these are added up in order.
  void run_splits() {
    if (!plan_.shares) {
      parallel_for(plan_.groups, threads_, [&](std::int64_t group, int worker) {
        BackwardBlock& block = workers_[static_cast<std::size_t>(worker)];
        open(block, group, 0);
        kernels_.load_rows(problem_, block);
        walk_splits(block, group, worker, {0, plan_.splits});
        store_splits(block, worker);
      });
      return;
    }
    parallel_for(plan_.groups * plan_.splits, threads_, [&](std::int64_t task, int worker) {
      const Int64 group = task / plan_.splits, split = task % plan_.splits;
      BackwardBlock& block = workers_[static_cast<std::size_t>(worker)];
      open(block, group, 0);
      kernels_.load_rows(problem_, block);
      walk_splits(block, group, group, {split, split + 1});
    });
    parallel_for(plan_.groups, threads_, [&](std::int64_t group, int worker) {
      BackwardBlock& block = workers_[static_cast<std::size_t>(worker)];
      open(block, group, 0);
      store_splits(block, group);
    });
  }

  // `place`: whose partial dq to use.
  float* partial_dq(Int64 place, Int64 split) const {
    return partial_dq_ + (place * plan_.splits + split) * split_elements();
  }

  // Splits counted from the first that the block's rows see, as many of them as there are.
  void walk_splits(BackwardBlock& block, Int64 group, Int64 place, IndexRange wanted) {
    const IndexRange tiles = tiles_of(plan_.tiling, block.any), splits = splits_of(tiles);
    const Int64 size = split_tiles(tiles), count = splits.end - splits.begin;
    float* const own_dq = block.dq;
    for (Int64 split = wanted.begin; split < std::min(wanted.end, count); ++split) {
      const Int64 begin = (splits.begin + split) * size;
      block.dq = partial_dq(place, split);
      walk(block, group, overlap(tiles, {begin, begin + size}));
    }
    block.dq = own_dq;
  }

  void store_splits(BackwardBlock& block, Int64 place) {
    const IndexRange splits = splits_of(tiles_of(plan_.tiling, block.any));
    kernels_.store_dq(problem_, block, partial_dq(place, 0), splits.end - splits.begin);
  }

  // Zeros for the tiles of keys that no row sees.
  void clear_unseen(const GradientSum& sum) const {
    if (sum.add) return;
    const AttnParams& params = problem_.params;
    std::vector<char> seen(static_cast<std::size_t>(plan_.tiles));
    for (Int64 b = 0; b < params.B; ++b) {
      std::fill(seen.begin(), seen.end(), 0);
      for (Int64 index = 0; index < plan_.blocks; ++index) {
        const IndexRange tiles = tiles_of_block(b, index);
        std::fill(seen.begin() + tiles.begin, seen.begin() + tiles.end, 1);
      }
      for (Int64 j = 0; j < params.Tk; ++j) {
        if (seen[static_cast<std::size_t>(j / plan_.tiling.keys)]) continue;
        for (Int64 h = 0; h < params.Hkv; ++h) {
          std::fill_n(sum.data + element_offset(sum.strides, b, j, h), params.hd, 0.0f);
        }
      }
    }
  }

  BackwardProblem problem_;
  const BackwardKernels& kernels_;
  const int threads_;
  const Plan plan_;
  std::vector<BackwardBlock> workers_;
  BlockQueue queue_;
  std::vector<std::atomic<Int32>> turns_;  // [groups][tiles]: the block that added to it last
  Scratch scratch_;
  float* partial_dq_;  // [groups, or workers][splits][rows][channels]
};

}  // namespace

void attention_bwd(const Problem& problem, CpuTarget target) {
  if (problem.B == 0 || problem.Tq == 0 || problem.Tk == 0) {
    if (!problem.accumulate) zero_gradients(problem);
    return;
  }
  const Operands& operands = problem.operands;
  BackwardProblem backward;
  backward.params = params_as<float>(problem);
  backward.arrays = {operands[kBufferQ],
                     operands[kBufferK],
                     operands[kBufferV],
                     elements<const float>(operands[kBufferO]),
                     operands[kBufferDout],
                     elements<const float>(operands[kBufferDlse]),
                     elements<const float>(operands[kBufferRowMax]),
                     elements<const float>(operands[kBufferRowSum]),
                     operands[kBufferDq],
                     operands[kBufferDk],
                     operands[kBufferDv]};
  backward.ranges = problem.ranges.data();
  backward.accumulate = problem.accumulate;
  Backward(backward, kernel_tables(target).backward).run();
}

}  // namespace forge::cpu
