// The schedule of few rows: keys in lanes, k and v streamed once, by all heads abreast where there
// are sequences and tiles of keys enough for the tasks.
#include <algorithm>

#include "cpu/scratch.h"
#include "cpu/splits.h"

namespace forge::cpu {

void run_decode(const Forward& forward) {
  const Int64 Hkv = forward.call.params.Hkv;
  const int threads = num_threads();
  const SplitPlan plan = plan_splits(forward, wanted_tasks(threads), 1, 1);
  // Of heads: the more there are, the less the memory is read in its order.
  const Int64 groups =
      std::clamp<Int64>(wanted_tasks(threads) / (plan.sequences * plan.splits), 1, Hkv);
  // Each worker's queries, widened.
  const Int64 room = is_half(forward.call.q.dtype)
                         ? forward.kernels.decode.group_rows * query_floats(forward.call.params.hd)
                         : 0;
  const Scratch scratch(static_cast<std::size_t>(plan.floats_in_all() + threads * room) *
                        sizeof(float));
  float* memory = reinterpret_cast<float*>(scratch.data());
  float* queries = memory + plan.floats_in_all();
  run_splits(forward, plan, groups, memory, threads,
             [&](const KeySplit& split, Int64 group, int worker) {
               DecodeTask task;
               task.b = split.b;
               task.mask = forward.mask(task.b);
               task.heads = {group * Hkv / groups, (group + 1) * Hkv / groups};
               task.tiles = split.tiles;
               task.parts = split.parts;
               task.totals = split.totals;
               task.queries = queries + worker * room;
               forward.kernels.decode.run(forward.call, task);
             });
}

}  // namespace forge::cpu
