// The forward's schedule for many rows: which tasks there are, in which order.
#include <algorithm>

#include "core/thread_pool.h"
#include "cpu/attention.h"
#include "cpu/scratch.h"
#include "cpu/splits.h"

namespace forge::cpu {

namespace {

// Rows a task: many, so that packing a key tile is paid for by many rows, but enough tasks to
// balance, and some even for a single head. Each packs its keys, so more tasks cost more.
Int64 rows_a_task(const Forward& forward, int threads) {
  constexpr Int64 kFewRows = 32, kManyRows = 128;
  const Int64 few_tasks = larger(8, threads), wanted_tasks = 2 * few_tasks;
  const Int64 widest = widest_head(forward.call.params);
  const Int64 row_block = forward.kernels.forward.row_block;
  const Int64 most = widest <= 64 ? 512 : widest <= 192 ? 256 : widest <= 256 ? 128 : 64;
  const auto rows_for = [&](Int64 tasks) {
    return ceil_div(forward.rows, ceil_div(tasks, forward.heads));
  };
  const Int64 least = std::max(kFewRows, std::min(kManyRows, rows_for(few_tasks)));
  const Int64 size = std::min(most, std::max(least, rows_for(wanted_tasks)));
  const Int64 tiles = ceil_div(forward.rows, size);
  return round_up(ceil_div(forward.rows, tiles), row_block);
}

// Many rows: row blocks in lanes against packed key tiles.
void run_tiles(const Forward& forward) {
  constexpr Int64 kLeastTiles = 4;  // of keys, a task
  const AttnParams& params = forward.call.params;
  const int threads = num_threads();
  const Int64 step = rows_a_task(forward, threads), blocks = ceil_div(forward.rows, step);
  const Int64 enough_tasks = smaller(larger(8, threads), wanted_tasks(threads));
  const std::size_t bytes =
      (forward.kernels.forward.scratch_bytes(forward.call, step) + 63) / 64 * 64;
  const auto run = [&](KvHead head, Int64 block, const KeySplit& split, char* scratch) {
    ForwardTask task;
    task.b = head.b;
    task.kv_head = head.head;
    task.mask = forward.mask(task.b);
    task.rows = {block * step, std::min(forward.rows, (block + 1) * step)};
    task.tiles = split.tiles;
    task.parts = split.parts;
    if (task.parts.first != nullptr) {
      task.parts.first += (task.kv_head * forward.rows + task.rows.begin) * forward.row_floats();
    }
    forward.kernels.forward.run(forward.call, task, scratch);
  };
  if (blocks * forward.heads < enough_tasks) {
    const Int64 shares = params.Hkv * blocks;
    const SplitPlan plan = plan_splits(forward, wanted_tasks(threads), shares, kLeastTiles);
    if (plan.splits > 1) {
      const std::size_t workers = static_cast<std::size_t>(threads);
      const Scratch scratch(bytes * workers +
                            static_cast<std::size_t>(plan.floats_in_all()) * sizeof(float));
      float* memory = reinterpret_cast<float*>(scratch.data() + bytes * workers);
      run_splits(forward, plan, shares, memory, threads,
                 [&](const KeySplit& split, Int64 share, int worker) {
                   run({split.b, share % params.Hkv}, share / params.Hkv, split,
                       scratch.data() + bytes * static_cast<std::size_t>(worker));
                 });
      return;
    }
  }
  const Int64 tasks = blocks * forward.heads;
  const Scratch scratch(bytes * static_cast<std::size_t>(std::min<Int64>(threads, tasks)));
  // Last rows first: under a causal mask they see the most keys.
  parallel_for(tasks, threads, [&](Int64 index, int worker) {
    run(kv_head_at(params, index % forward.heads), blocks - 1 - index / forward.heads, {},
        scratch.data() + bytes * static_cast<std::size_t>(worker));
  });
}

// The keys of each sequence from the first to the last that some query sees.
std::vector<IndexRange> keys_of_sequences(const Problem& problem, const AttnParams& params) {
  std::vector<IndexRange> keys;
  keys.reserve(static_cast<std::size_t>(params.B));
  for (Int64 b = 0; b < params.B; ++b) {
    const SequenceMask mask(params, problem.ranges.data(), b);
    if (mask.ascends()) {
      keys.push_back({mask.keys(0).begin, mask.keys(params.Tq - 1).end});
      continue;
    }
    keys.push_back(nothing());
    for (Int64 i = 0; i < params.Tq; ++i) keys.back() = hull(keys.back(), mask.keys(i));
  }
  return keys;
}

}  // namespace

void attention_fwd(const Problem& problem, CpuTarget target) {
  if (problem.B == 0 || problem.Tq == 0) return;
  const Operands& operands = problem.operands;
  const AttnParams params = params_as<float>(problem);
  const ForwardCall call = {params,
                            operands[kBufferQ],
                            operands[kBufferK],
                            operands[kBufferV],
                            operands[kBufferO],
                            operands[kBufferRounded],
                            {operands[kBufferBias], operands[kBufferMask]},
                            operands[kBufferSinks],
                            elements<float>(operands[kBufferRowMax]),
                            elements<float>(operands[kBufferRowSum])};
  const Forward forward = {problem,
                           call,
                           kernel_tables(target),
                           rows_of_group(params),
                           kv_heads(params),
                           keys_of_sequences(problem, params)};
  // Against few keys packing a block of rows would cost more than the rows.
  const Int64 most_rows =
      params.Tk >= 128 ? forward.kernels.decode.most_rows : forward.kernels.forward.row_block / 2;
  if (forward.rows <= most_rows) {
    run_decode(forward);
  } else {
    run_tiles(forward);
  }
}

}  // namespace forge::cpu
