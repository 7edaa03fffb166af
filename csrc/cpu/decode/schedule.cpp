// The schedule of few rows: keys in lanes, cut into splits. It depends on the problem only.
#include <algorithm>

#include "core/thread_pool.h"
#include "cpu/scratch.h"
#include "cpu/splits.h"

namespace forge::cpu {
namespace {

// Few rows of some sequences: keys in lanes, k and v streamed once.
void decode_sequences(const Forward& forward, const Splits& splits, Int64 groups) {
  const Int64 Hkv = forward.call.params.Hkv;
  const Int64 parts = (splits.end - splits.begin) * splits.splits;
  parallel_for(parts * groups, [&](Int64 index, int) {
    const Int64 part = index / groups, group = index % groups, split = part % splits.splits;
    DecodeTask task;
    task.b = splits.begin + part / splits.splits;
    task.band = forward.band(task.b);
    task.heads = {group * Hkv / groups, (group + 1) * Hkv / groups};
    task.keys = keys_of_split(forward, task.band, splits.splits, split);
    task.partial = splits.at(task.b, split);
    forward.kernels.decode.run(forward.call, task);
  });
  combine_splits(forward, splits);
}

}  // namespace

// As many sequences at a time as their unfinished rows have room.
void run_decode(const Forward& forward) {
  const AttnParams& params = forward.call.params;
  Splits splits;
  splits.floats = params.Hkv * forward.rows * forward.row_floats();
  const Int64 room = std::max<Int64>(1, kMostPartialFloats / splits.floats);
  const Int64 sequences = std::min(params.B, room);
  splits.splits = split_count(forward, sequences, sequences * splits.floats, 64);
  const Int64 groups =
      std::min<Int64>(params.Hkv, ceil_div(kWantedSplits, sequences * splits.splits));
  const Int64 floats = sequences * splits.splits * splits.floats;
  const Scratch scratch(static_cast<std::size_t>(floats) * sizeof(float));
  splits.partial = reinterpret_cast<float*>(scratch.data());
  for (splits.begin = 0; splits.begin < params.B; splits.begin = splits.end) {
    splits.end = std::min(params.B, splits.begin + sequences);
    decode_sequences(forward, splits, groups);
  }
}

}  // namespace forge::cpu
