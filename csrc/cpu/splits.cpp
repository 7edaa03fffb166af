#include "cpu/splits.h"

#include <algorithm>

namespace forge::cpu {

IndexRange Forward::tiles(Int64 b) const {
  const IndexRange seen = keys[static_cast<std::size_t>(b)];
  const Int64 step = tile_keys();
  return is_empty(seen) ? nothing() : IndexRange{seen.begin / step, ceil_div(seen.end, step)};
}

SplitPlan plan_splits(const Forward& forward, Int64 tasks, Int64 shares, Int64 least_tiles) {
  const AttnParams& params = forward.call.params;
  SplitPlan plan;
  plan.floats = params.Hkv * forward.rows * forward.row_floats();
  const Int64 room = std::max<Int64>(2, kMostPartFloats / plan.floats);  // totals and parts
  plan.sequences = std::min(params.B, room / 2);
  plan.tiles = std::max<Int64>(1, ceil_div(params.Tk, forward.tile_keys()));
  plan.splits = std::clamp<Int64>(ceil_div(tasks, plan.sequences * shares), 1,
                                  std::max<Int64>(1, plan.tiles / least_tiles));
  if (plan.splits == 1) return plan;
  // Rounds of equal length.
  const Int64 most = std::max<Int64>(1, room / plan.sequences - 1);
  plan.tiles = ceil_div(plan.tiles, ceil_div(plan.tiles, most));
  plan.splits = std::max<Int64>(2, std::min(plan.splits, plan.tiles));
  return plan;
}

IndexRange SplitRound::tiles_of(const Forward& forward, Int64 b) const {
  const IndexRange all = forward.tiles(b);
  return overlap(all, {all.begin + tiles.begin, all.begin + tiles.end});
}

KeySplit SplitRound::split(const Forward& forward, Int64 b, Int64 index) const {
  const bool merges = plan.splits == 1;
  const IndexRange mine = tiles_of(forward, b);
  const Int64 count = std::max<Int64>(0, mine.end - mine.begin);
  const Int64 begin = count * index / plan.splits, end = count * (index + 1) / plan.splits;
  return {b,
          {mine.begin + begin, mine.begin + end},
          {parts(b) + (merges ? 0 : begin * plan.floats), plan.floats},
          merges ? totals(b) : nullptr};
}

void merge_round(const Forward& forward, const SplitRound& round) {
  constexpr Int64 kRows = 16;
  const Int64 pieces = ceil_div(forward.rows, kRows), Hkv = forward.call.params.Hkv;
  const Int64 sequences = round.sequences.end - round.sequences.begin;
  parallel_for(sequences * Hkv * pieces, [&](Int64 index, int) {
    const KvHead head = kv_head_at(forward.call.params, index / pieces);
    const Int64 first = index % pieces * kRows, floats = round.plan.floats;
    const bool merged = round.plan.splits == 1;  // by the tasks themselves
    MergeTask task;
    task.b = round.sequences.begin + head.b;
    task.kv_head = head.head;
    task.mask = forward.mask(task.b);
    task.rows = {first, std::min(forward.rows, first + kRows)};
    const Int64 place = (task.kv_head * forward.rows + first) * forward.row_floats();
    const IndexRange tiles = round.tiles_of(forward, task.b);
    task.count = merged ? 0 : std::max<Int64>(0, tiles.end - tiles.begin);
    task.parts = {round.parts(task.b) + place, floats};
    task.totals = round.totals(task.b) + place;
    task.first = !merged && round.tiles.begin == 0;
    task.last = round.last;
    forward.kernels.decode.merge_parts(forward.call, task);
  });
}

}  // namespace forge::cpu
