// The forward's keys cut into splits, whose unfinished rows are put together afterwards: what the
// schedules of many rows and of few share.
#pragma once

#include "cpu/kernel_tables.h"

namespace forge::cpu {

constexpr Int64 kWantedSplits = 32;                   // of few rows: a split costs next to nothing
constexpr Int64 kMostPartialFloats = Int64{1} << 20;  // 4 MiB

// A call, as the schedules see it.
struct Forward {
  const Problem& problem;
  ForwardCall call;
  KernelTables kernels;
  Int64 rows;   // a kv head: rep * Tq
  Int64 heads;  // B * Hkv

  AttnBand band(Int64 b) const {
    return attn_band(call.params, problem.ranges[static_cast<std::size_t>(b)]);
  }
  Int64 row_floats() const { return partial_row_floats(call.params.hd); }
};

// Keys of sequence b that any query sees, cut into `splits` even parts; the part `split`.
IndexRange keys_of_split(const Forward& forward, const AttnBand& band, Int64 splits, Int64 split);

// How many parts to cut the keys into so that `tasks` tasks, whose unfinished rows take `floats`,
// become enough, each of some length.
Int64 split_count(const Forward& forward, Int64 tasks, Int64 floats, Int64 least_keys);

// Sequences [begin, end), their unfinished rows at `partial`: [end - begin][splits][Hkv][rows].
struct Splits {
  Int64 begin;
  Int64 end;
  Int64 splits;
  Int64 floats;  // of one split of one sequence
  float* partial;

  float* at(Int64 b, Int64 split) const {
    return partial + ((b - begin) * splits + split) * floats;
  }
};

// Adds up what the splits left, in their order. A task is some rows of a kv head.
void combine_splits(const Forward& forward, const Splits& splits);

// The schedule of few rows a kv head (decode/schedule.cpp).
void run_decode(const Forward& forward);

}  // namespace forge::cpu
