#include "cpu/splits.h"

#include <algorithm>

#include "core/thread_pool.h"

namespace forge::cpu {

IndexRange keys_of_split(const Forward& forward, const AttnBand& band, Int64 splits, Int64 split) {
  const IndexRange keys = {visible_keys(band, 0).begin,
                           visible_keys(band, forward.call.params.Tq - 1).end};
  const Int64 count = std::max<Int64>(0, keys.end - keys.begin), part = ceil_div(count, splits);
  return {keys.begin + std::min(count, split * part),
          keys.begin + std::min(count, (split + 1) * part)};
}

Int64 split_count(const Forward& forward, Int64 tasks, Int64 floats, Int64 least_keys) {
  const Int64 most = std::min(kMostPartialFloats / floats, forward.call.params.Tk / least_keys);
  return std::max<Int64>(1, std::min(ceil_div(kWantedSplits, tasks), most));
}

void combine_splits(const Forward& forward, const Splits& splits) {
  constexpr Int64 kRows = 16;
  const Int64 parts = ceil_div(forward.rows, kRows), Hkv = forward.call.params.Hkv;
  parallel_for((splits.end - splits.begin) * Hkv * parts, [&](Int64 index, int) {
    const KvHead head = kv_head_at(forward.call.params, splits.begin * Hkv + index / parts);
    CombineTask task;
    task.b = head.b;
    task.kv_head = head.head;
    task.band = forward.band(task.b);
    const Int64 first = index % parts * kRows;
    task.rows = {first, std::min(forward.rows, first + kRows)};
    task.splits = splits.splits;
    task.split_floats = splits.floats;
    task.partial = splits.at(task.b, 0) +
                   (task.kv_head * forward.rows + task.rows.begin) * forward.row_floats();
    forward.kernels.decode.combine(forward.call, task);
  });
}

}  // namespace forge::cpu
