// The schedule of the backward.
//
// A task is a block of rows of one kv head; it walks over the tiles of keys that its rows see, in
// ascending order. dq is private to it. A tile of dk and dv is added to by the blocks that see it
// in descending order of their rows, each waiting for the next higher that takes part in the tile:
// tasks start in that order, so a predecessor is always running or done, and it is usually a tile
// ahead. So there are no copies of dk and dv to add up, and no sum depends on which thread did
// what. With a single block (short queries) the keys are cut into splits instead, each with a dq of
// its own, which are added up in order.
#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

#include "core/stop.h"
#include "core/thread_pool.h"
#include "core/zero_fill.h"
#include "cpu/attention.h"
#include "cpu/backward/bias_gradient.h"
#include "cpu/backward/block_queue.h"
#include "cpu/backward/key_sums.h"
#include "cpu/backward/plan.h"
#include "cpu/backward/sink_gradient.h"
#include "cpu/scratch.h"

namespace forge::cpu {

namespace {

// Which keys the block's rows see, alone and together.
void find_keys(const BackwardProblem& problem, Int64 lanes, BackwardBlock& block) {
  const AttnParams& params = problem.params;
  const SequenceMask mask(params, problem.ranges, block.b);
  Int64 live = 0;
  block.all = {0, params.Tk};
  RowCursor at = row_cursor(params, block.kv_head, block.row_begin);
  for (Int64 r = 0; r < block.rows; ++r, at.next()) {
    IndexRange keys = mask.keys(at.query);
    const float sum = problem.arrays.row_sum[row_index(params, block.b, at.head, at.query)];
    if (is_empty(keys) || sum == 0) keys = nothing();
    block.seen[r] = keys;
    if (is_empty(keys)) continue;
    ++live;
    block.all = overlap(block.all, keys);
  }
  std::fill(block.seen + block.rows, block.seen + block.tiling.rows, nothing());
  block.all_live = live == round_up(block.rows, lanes);
  if (live == 0) block.all = nothing();
}

// Where the rows' pairs lie; past the last row it is repeated.
void find_pairs(const BackwardProblem& problem, BackwardBlock& block) {
  RowCursor at = row_cursor(problem.params, block.kv_head, block.row_begin);
  for (Int64 r = 0; r < block.tiling.rows; ++r) {
    block.pairs[r] = r < block.rows ? pair_row(problem.arrays.pairs, block.b, at.head, at.query)
                                    : block.pairs[r - 1];
    at.next();
  }
}

class Backward {
 public:
  Backward(const BackwardProblem& problem, const BackwardKernels& kernels, const BiasGradient& bias)
      : problem_(problem),
        kernels_(kernels),
        bias_(bias),
        threads_(num_threads()),
        plan_(make_plan(problem.params, kernels,
                        {problem.arrays.pairs.given(), bias.axes(), bias.adds_up_group()})),
        tiles_(problem.params, problem.ranges, plan_),
        workers_(static_cast<std::size_t>(plan_workers())),
        queue_(plan_.groups, plan_.blocks, workers_.size()),
        turns_(static_cast<std::size_t>(plan_.groups * plan_.tiles)),
        scratch_(static_cast<std::size_t>(worker_count() * block_bytes() + partial_bytes() +
                                          key_sum_bytes(problem.arrays.dk) +
                                          key_sum_bytes(problem.arrays.dv))) {
    for (std::size_t w = 0; w < workers_.size(); ++w) {
      lay_out(plan_, scratch_.data() + static_cast<Int64>(w) * block_bytes(), workers_[w]);
    }
    char* rest = scratch_.data() + worker_count() * block_bytes();
    partial_dq_ = reinterpret_cast<float*>(rest);
    rest += partial_bytes();
    problem_.dk = key_sum_of(problem, problem.arrays.dk, rest);
    problem_.dv = key_sum_of(problem, problem.arrays.dv, rest + key_sum_bytes(problem.arrays.dk));
    for (std::atomic<Int32>& turn : turns_) turn.store(INT32_MAX, std::memory_order_relaxed);
  }

  void run() {
    problem_.bias = bias_.begin();
    clear_unseen();
    if (plan_.splits > 1) {
      run_splits();
    } else {
      run_blocks();
    }
    round_key_sum(problem_, kernels_, problem_.arrays.dk, problem_.dk);
    round_key_sum(problem_, kernels_, problem_.arrays.dv, problem_.dv);
    bias_.finish(kernels_);
  }

 private:
  void run_blocks() {
    parallel_for(plan_.groups * plan_.blocks, threads_, [&](std::int64_t, int worker) {
      const BlockQueue::Item item = queue_.take(worker);
      BackwardBlock& block = workers_[static_cast<std::size_t>(worker)];
      open(block, item.group, item.block);
      kernels_.load_rows(problem_, block);
      walk(block, item.group, tiles_.of(block.b, item.block));
      kernels_.store_dq(problem_, block, block.dq, 1);
      store_row_sums(block);
    });
  }

  // Once the tiles are known.
  Int64 plan_workers() {
    plan_splits(plan_, tiles_, problem_.params.B, threads_);
    return worker_count();
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
    const IndexRange rows = plan_.rows_of_block(index);
    block.b = head.b;
    block.kv_head = head.head;
    block.row_begin = rows.begin;
    block.rows = rows.end - rows.begin;
    find_keys(problem_, plan_.lanes, block);
    if (block.pairs) find_pairs(problem_, block);
    if (block.row_sums) std::fill_n(block.row_sums, plan_.tiling.rows, 0.0f);
  }

  void walk(BackwardBlock& block, Int64 group, IndexRange tiles) {
    std::fill_n(block.dq, block.rows * plan_.tiling.channels, 0.0f);
    const Int64 index = block.row_begin / plan_.rows;
    for (Int64 tile = tiles.begin; tile < tiles.end; ++tile) {
      if (stop_requested()) return;
      const IndexRange keys = keys_of_tile(tile);
      block.tile_begin = keys.begin;
      block.tile_keys = keys.end - keys.begin;
      const bool seen = kernels_.find_tile(problem_, block);
      if (seen) {
        kernels_.load_keys(problem_, block);
        kernels_.scores(problem_, block);
      }
      const Int64 before = tiles_.before(block.b, index, tile);
      const bool follows = before >= 0;
      if (follows && !wait_for(turn(group, tile), before)) return;
      const Int64 group_before = before_on_bias(group, index, tile);
      if (group_before >= 0 && !wait_for(turn(group_before, tile), index)) return;
      if (seen) {
        kernels_.key_gradients(problem_, block, follows);
      } else if (!follows) {
        clear_keys(problem_.dk, block.b, block.kv_head, keys);
        clear_keys(problem_.dv, block.b, block.kv_head, keys);
      }
      if (seen) kernels_.bias_gradients(problem_, block);
      turn(group, tile).store(static_cast<Int32>(index), std::memory_order_release);
      if (seen) kernels_.row_gradients(block);
    }
  }

  IndexRange keys_of_tile(Int64 tile) const {
    const Int64 begin = tile * plan_.tiling.keys;
    return {begin, std::min(begin + plan_.tiling.keys, problem_.params.Tk)};
  }

  // The kv head before `group` of which the same block adds to a tile of dbias, if heads or
  // sequences share its elements. Groups start in ascending order, so that it runs or is done.
  Int64 before_on_bias(Int64 group, Int64 index, Int64 tile) const {
    do {
      group = bias_.group_before(group);
    } while (group >= 0 && !contains(tiles_.of(kv_head_at(problem_.params, group).b, index), tile));
    return group;
  }

  std::atomic<Int32>& turn(Int64 group, Int64 tile) {
    return turns_[static_cast<std::size_t>(group * plan_.tiles + tile)];
  }

  // Until that block, and thus those above it, are through with a tile. False where the call is
  // interrupted: then the turn may never come.
  static bool wait_for(const std::atomic<Int32>& turn, Int64 index) {
    for (int spins = 0; turn.load(std::memory_order_acquire) > index; ++spins) {
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
        store_row_sums(block);
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
    const IndexRange tiles = tiles_.of(block.b, 0), splits = splits_of(tiles);
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
    const IndexRange splits = splits_of(tiles_.of(block.b, 0));
    kernels_.store_dq(problem_, block, partial_dq(place, 0), splits.end - splits.begin);
  }

  void store_row_sums(const BackwardBlock& block) const {
    if (problem_.bias.axes != BiasAxes::kRows) return;
    const auto& strides = problem_.bias.strides;
    RowCursor at = row_cursor(problem_.params, block.kv_head, block.row_begin);
    for (Int64 r = 0; r < block.rows; ++r, at.next()) {
      if (!is_live(block, r)) continue;
      problem_.bias.data[block.b * strides[0] + at.head * strides[1] + at.query] =
          block.row_sums[r];
    }
  }

  // Zeros for the tiles that no block takes part in.
  void clear_unseen() const {
    const AttnParams& params = problem_.params;
    std::vector<char> seen(static_cast<std::size_t>(plan_.tiles));
    for (Int64 b = 0; b < params.B; ++b) {
      std::fill(seen.begin(), seen.end(), 0);
      for (Int64 index = 0; index < plan_.blocks; ++index) {
        const IndexRange tiles = tiles_.of(b, index);
        std::fill(seen.begin() + tiles.begin, seen.begin() + tiles.end, 1);
      }
      for (Int64 tile = 0; tile < plan_.tiles; ++tile) {
        if (seen[static_cast<std::size_t>(tile)]) continue;
        for (Int64 h = 0; h < params.Hkv; ++h) {
          clear_keys(problem_.dk, b, h, keys_of_tile(tile));
          clear_keys(problem_.dv, b, h, keys_of_tile(tile));
        }
      }
    }
  }

  BackwardProblem problem_;
  const BackwardKernels& kernels_;
  const BiasGradient& bias_;
  const int threads_;
  Plan plan_;
  const BlockTiles tiles_;
  std::vector<BackwardBlock> workers_;
  BlockQueue queue_;
  std::vector<std::atomic<Int32>> turns_;  // [groups][tiles]: the block that was there last
  Scratch scratch_;
  float* partial_dq_;  // [groups, or workers][splits][rows][channels]
};

BackwardProblem backward_problem(const Problem& problem) {
  const Operands& operands = problem.operands;
  BackwardProblem backward{};
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
                     operands[kBufferDv],
                     {operands[kBufferBias], operands[kBufferMask]},
                     operands[kBufferDbias],
                     operands[kBufferSinks],
                     operands[kBufferDsinks]};
  backward.ranges = problem.ranges.data();
  backward.accumulate = problem.accumulate;
  return backward;
}

}  // namespace

void attention_bwd(const Problem& problem, CpuTarget target) {
  const BackwardProblem backward = backward_problem(problem);
  const BackwardKernels& kernels = kernel_tables(target).backward;
  const SinkGradient sinks(backward);
  const BiasGradient bias(backward);
  if (problem.B == 0 || problem.Tq == 0 || problem.Tk == 0) {
    if (!problem.accumulate) zero_gradients(problem);
  } else {
    Backward(backward, kernels, bias).run();
  }
  sinks.run(kernels);
}

}  // namespace forge::cpu
