// Few query rows against many keys, compiled once per target. Keys lie in vector lanes, transposed
// in registers on their way in, so k and v are read once, in place, for the whole group: the
// memory's speed is what bounds it. What a task reads, it reads some rows abreast over the width of
// all its heads, and prefetches the next rows meanwhile, in the memory's order: the pattern that
// hardware prefetchers follow (rows of one head alone, far apart, they do not).
#include "cpu/decode/kernel.h"

#include <cstring>
#include <type_traits>

#include "core/stop.h"
#include "cpu/attention.h"
#include "cpu/bias.h"
#include "cpu/decode/tile.h"

namespace forge::cpu::FORGE_TARGET {
namespace {

constexpr int kMostRows = 16;   // a kv head
constexpr int kGroupRows = 64;  // of all heads that a group reads abreast

// Rows of some kv heads, head by head, that go through the keys together.
struct RowGroup {
  Int64 head_begin;
  int heads;
  int rows;  // a head
  const Real* q[kGroupRows];
  Real* parts[kGroupRows];  // of the tile at hand
  Real* totals[kGroupRows];
  IndexRange keys[kGroupRows];  // that each sees
  PairRow pairs[kGroupRows];
};

// Turns of rows that a head takes.
FORGE_INLINE int turns_of(int rows) { return (rows + kRowsAtOnce - 1) / kRowsAtOnce; }

// All rows of one kv head, `head` of the group; `ahead`: read next; `panel`: room for one.
template <typename Map, typename Stored>
FORGE_INLINE void score_head(const RowGroup& group, int head, const KeyBlock<Stored>& keys,
                             const KeyBlock<Stored>& ahead, Int64 hd, const Map& map, Real* panel,
                             Real* scores) {
  const Real* filled = nullptr;
  if (!kKeysInRegisters || keys.count < kLanes) {
    fill_panel(keys, hd, panel);
    filled = panel;
  }
  const int turns = turns_of(group.rows);
  for (int r = 0; r < group.rows; r += kRowsAtOnce) {
    const Turn turn = {head * turns + r / kRowsAtOnce, 1, turns, group.heads};
    LinesAhead lines = share_ahead(ahead, turn);
    if (filled) lines.rest();  // nothing below does it
    const Real* const* q = group.q + head * group.rows + r;
    Real* to = scores + r * kMostTileKeys;
    switch (group.rows - r) {
      case 1:
        score_rows<1>(q, keys, filled, hd, map, lines, to);
        break;
      case 2:
        score_rows<2>(q, keys, filled, hd, map, lines, to);
        break;
      case 3:
        score_rows<3>(q, keys, filled, hd, map, lines, to);
        break;
      default:
        score_rows<4>(q, keys, filled, hd, map, lines, to);
    }
    lines.rest();
  }
}

// scores[row][key] of all rows of a group against the keys of a tile. k.first is row 0's, head 0's;
// `next`: the values, read after them.
template <typename Map, typename Stored>
void score_tile(const RowGroup& group, const KeyBlock<Stored>& k, const KeyBlock<Stored>& next,
                Int64 hd, const Map& map, Real* scores) {
  alignas(64) Real panel[(kMaxHeadDim + kLanes) * kPanelKeys];
  constexpr int kStep = kPanelKeys;
  for (int key = 0; key < k.count; key += kStep) {
    const KeyBlock<Stored> ahead = key + kStep < k.count
                                       ? rows_from(k, group.head_begin, key + kStep, kStep)
                                       : rows_from(next, group.head_begin, 0, kValueKeys);
    for (int head = 0; head < group.heads; ++head) {
      const KeyBlock<Stored> keys = rows_from(k, group.head_begin + head, key, kStep);
      const int row = head * group.rows;
      Real* to = scores + row * kMostTileKeys + key;
      if constexpr (kKeysInRegisters) {
        if (group.rows == 1 && head + 1 < group.heads && keys.count == kLanes) {
          LinesAhead lines = share_ahead(ahead, {head, 2, 1, group.heads});
          score_keys<2, 1>(group.q + row, keys, hd, map, lines, to);
          lines.rest();
          ++head;
          continue;
        }
      }
      score_head(group, head, keys, ahead, hd, map, panel, to);
    }
  }
}

// Adds up p v of a tile in which every row sees every key. `next`: the keys read after it.
template <typename Stored>
void add_tile(const RowGroup& group, const KeyBlock<Stored>& v, const KeyBlock<Stored>& next,
              const Real* scores) {
  const int turns = turns_of(group.rows);
  for (int key = 0; key < v.count; key += kValueKeys) {
    const KeyBlock<Stored> ahead =
        key + kValueKeys < v.count ? rows_from(v, group.head_begin, key + kValueKeys, kValueKeys)
                                   : rows_from(next, group.head_begin, 0, kPanelKeys);
    for (int head = 0; head < group.heads; ++head) {
      const KeyBlock<Stored> values = rows_from(v, group.head_begin + head, key, kValueKeys);
      for (int r = 0; r < group.rows; r += kRowsAtOnce) {
        const Turn turn = {head * turns + r / kRowsAtOnce, 1, turns, group.heads};
        LinesAhead lines = share_ahead(ahead, turn);
        const int row = head * group.rows + r;
        const Real* p = scores + row * kMostTileKeys + key;
        Real* const* parts = group.parts + row;
        switch (group.rows - r) {
          case 1:
            add_keys<1>(p, values, key == 0, lines, parts);
            break;
          case 2:
            add_keys<2>(p, values, key == 0, lines, parts);
            break;
          case 3:
            add_keys<3>(p, values, key == 0, lines, parts);
            break;
          default:
            add_keys<4>(p, values, key == 0, lines, parts);
        }
        lines.rest();
      }
    }
  }
}

// A tile's keys as each row of a group sees them: none of them where all that they see is hidden.
struct RowsSeen {
  int from[kGroupRows];
  int to[kGroupRows];
  bool any;          // some row sees one
  bool every;        // each row sees them all, but for what `bias` hides
  const Real* bias;  // [row][kMostTileKeys]; null: none
};

FORGE_INLINE RowsSeen rows_seen(const ForwardCall& call, const RowGroup& group, IndexRange keys,
                                Real* room) {
  RowsSeen seen;
  const int count = static_cast<int>(keys.end - keys.begin), rows = group.heads * group.rows;
  seen.any = false;
  seen.every = count > 0;
  seen.bias = call.pairs.given() ? room : nullptr;
  for (int row = 0; row < rows; ++row) {
    int from = key_in_tile(group.keys[row].begin, keys.begin, count);
    int to = key_in_tile(group.keys[row].end, keys.begin, count);
    if (from >= to) from = to = 0;
    seen.every = seen.every && from == 0 && to == count;
    seen.from[row] = from;
    seen.to[row] = to;
    if (from == to) continue;
    seen.any |=
        !seen.bias || pack_bias_row(call.pairs, group.pairs[row], keys, room + row * kMostTileKeys);
  }
  if (seen.any) return seen;
  seen.every = false;
  for (int row = 0; row < rows; ++row) seen.from[row] = seen.to[row] = 0;
  return seen;
}

// The parts of a group's rows from the keys of a tile, `seen` of them; `next`: the keys after them.
template <typename Map, typename Stored>
void run_tile(const RowGroup& group, const RowsSeen& seen, const KeyBlock<Stored>& k,
              const KeyBlock<Stored>& v, const KeyBlock<Stored>& next, const Map& map) {
  alignas(64) Real scores[kGroupRows * kMostTileKeys];
  score_tile(group, k, v, k.width, map, scores);
  const int rows = group.heads * group.rows;
  for (int row = 0; row < rows; ++row) {
    Real* to = scores + row * kMostTileKeys;
    if (seen.bias) {
      softmax_row<true>(to, seen.bias + row * kMostTileKeys, seen.from[row], seen.to[row],
                        group.parts[row]);
    } else {
      softmax_row<false>(to, nullptr, seen.from[row], seen.to[row], group.parts[row]);
    }
  }
  if (seen.every) add_tile(group, v, next, scores);
  if (seen.every && !seen.bias) return;
  // An edge of the mask: each row by itself, so that it meets no value it does not see.
  for (int row = 0; row < rows; ++row) {
    const int from = seen.from[row];
    const Real* p = scores + row * kMostTileKeys + from;
    KeyBlock<Stored> values = rows_from(v, group.head_begin + row / group.rows, from, v.count);
    values.count = seen.to[row] - from;
    LinesAhead none(nullptr, 0, 0, 0);
    if (!seen.every) add_keys<1>(p, values, true, none, group.parts + row);
    if (seen.bias) mend_part(p, seen.bias + row * kMostTileKeys + from, values, group.parts[row]);
  }
}

FORGE_INLINE void clear_total(Real* total, Int64 floats) {
  for (Int64 n = 0; n < floats; ++n) total[n] = 0;
  total[0] = -__builtin_inff();
}

// A query where it lies, or widened into `room`.
FORGE_INLINE const Real* query_row(const ForwardCall& call, Int64 b, const RowCursor& at,
                                   Real* room) {
  const Int64 offset = element_offset(call.params.q, b, at.query, at.head), hd = call.params.hd;
  return with_elements(call.q, [&](const auto* q) -> const Real* {
    if constexpr (std::is_same_v<decltype(q), const Real*>) {
      return q + offset;
    } else {
      copy_rows(q + offset, 0, hd, 1, 1, room, 0);
      return room;
    }
  });
}

// Returns the keys that some row of the group sees, from the first of a class on.
IndexRange start_group(const ForwardCall& call, const DecodeTask& task, Int64 head_begin,
                       Int64 heads, RowGroup& group) {
  const AttnParams& params = call.params;
  const Int64 rows = rows_of_group(params), floats = part_floats(params.hv);
  group.head_begin = head_begin;
  group.heads = static_cast<int>(heads);
  group.rows = static_cast<int>(rows);
  IndexRange any = nothing();
  Int64 row = 0;
  for (Int64 head = head_begin; head < head_begin + heads; ++head) {
    RowCursor at = row_cursor(params, head, 0);
    for (Int64 r = 0; r < rows; ++r, ++row, at.next()) {
      group.q[row] = query_row(call, task.b, at, task.queries + row * query_floats(params.hd));
      const Int64 place = (head * rows + r) * floats;
      group.parts[row] = task.parts.first + place;
      group.totals[row] = nullptr;
      if (task.totals) {
        // The first part is the total so far.
        group.parts[row] = group.totals[row] = task.totals + place;
        if (is_empty(task.tiles)) clear_total(group.totals[row], floats);
      }
      if (call.pairs.given()) group.pairs[row] = pair_row(call.pairs, task.b, at.head, at.query);
      group.keys[row] = task.mask.keys(at.query);
      any = hull(any, group.keys[row]);
    }
  }
  any.begin = class_begin(any.begin);
  return any;
}

// The parts of a tile are done: merges them, or moves on to the next tile's.
FORGE_INLINE void finish_tile(RowGroup& group, const DecodeTask& task, Int64 hv) {
  const Int64 floats = part_floats(hv);
  for (int row = 0; row < group.heads * group.rows; ++row) {
    if (!task.totals) {
      group.parts[row] += task.parts.stride;
    } else if (group.parts[row] != group.totals[row]) {
      merge_row(group.totals[row], {group.parts[row], 0}, 1, floats);
    } else {
      group.parts[row] = task.parts.first + (group.totals[row] - task.totals);
    }
  }
}

template <typename Map, typename Stored>
void run_task(const ForwardCall& call, const DecodeTask& task, const Stored* k_array,
              const Stored* v_array, const Map& map) {
  const AttnParams& params = call.params;
  const Int64 heads_at_once = larger(1, kGroupRows / rows_of_group(params));
  const Int64 step = tile_keys(widest_head(params));
  alignas(64) Real bias[kGroupRows * kMostTileKeys];
  for (Int64 head = task.heads.begin; head < task.heads.end; head += heads_at_once) {
    RowGroup group;
    const Int64 heads = smaller(heads_at_once, task.heads.end - head);
    const IndexRange any = start_group(call, task, head, heads, group);
    for (Int64 tile = task.tiles.begin; tile < task.tiles.end; ++tile) {
      if (stop_requested()) return;
      IndexRange keys = overlap({tile * step, (tile + 1) * step}, any);
      if (is_empty(keys)) keys.end = keys.begin;
      const RowsSeen seen = rows_seen(call, group, keys, bias);
      const int count = seen.any ? static_cast<int>(keys.end - keys.begin) : 0;
      const Int64 ahead = tile + 1 < task.tiles.end ? smaller(step, any.end - keys.end) : 0;
      const KeyBlock<Stored> k = {k_array + element_offset(params.k, task.b, keys.begin, 0),
                                  params.k.row, params.k.head, params.hd, count};
      const KeyBlock<Stored> v = {v_array + element_offset(params.v, task.b, keys.begin, 0),
                                  params.v.row, params.v.head, params.hv, count};
      const KeyBlock<Stored> next = {k.first + (keys.end - keys.begin) * params.k.row, params.k.row,
                                     params.k.head, params.hd, static_cast<int>(ahead)};
      run_tile(group, seen, k, v, next, map);
      finish_tile(group, task, params.hv);
    }
  }
}

void run(const ForwardCall& call, const DecodeTask& task) {
  with_score_map(call.params, [&](const auto& map) {
    with_elements(call.k,
                  [&](const auto* k) { run_task(call, task, k, elements_like(k, call.v), map); });
  });
}

// A row's total to its place, finished.
template <typename Stored>
FORGE_INLINE void finish_row(const Real* total, const RowEnd& end, Int64 hv, Stored* o) {
  for (Int64 d = 0; d < hv; d += kLanes) {
    const Vec sum = finished_sum(load(total + kPartHead + d), broadcast(end.factor));
    store_within(o, d, hv, end.row.live ? sum : Vec{});
  }
}

FORGE_INLINE void finish_row_in(const Operand& o, const Real* total, const RowEnd& end, Int64 b,
                                const RowCursor& at) {
  const Int64 offset = element_offset(o.heads_strides(), b, at.query, at.head);
  with_elements(o, [&](auto* to) { finish_row(total, end, o.shape[3], to + offset); });
}

void merge_parts(const ForwardCall& call, const MergeTask& task) {
  const AttnParams& params = call.params;
  const Int64 floats = part_floats(params.hv);
  RowCursor at = row_cursor(params, task.kv_head, task.rows.begin);
  for (Int64 row = task.rows.begin; row < task.rows.end; ++row, at.next()) {
    const Int64 place = (row - task.rows.begin) * floats;
    Real* total = task.totals + place;
    Parts parts = {task.parts.first + place, task.parts.stride};
    Int64 count = task.count;
    if (task.first && count == 0) clear_total(total, floats);
    if (task.first && count > 0) {  // the first part is the total so far
      std::memcpy(total, parts.first, static_cast<std::size_t>(floats) * sizeof(Real));
      parts.first += parts.stride;
      --count;
    }
    merge_row(total, parts, count, floats);
    if (!task.last) continue;
    const RowEnd end = end_of_row(!is_empty(task.mask.keys(at.query)), total[0], total[1],
                                  sink_of(call.sinks, task.b, at.head, at.query));
    finish_row_in(call.o, total, end, task.b, at);
    if (call.rounded.data) finish_row_in(call.rounded, total, end, task.b, at);
    if (call.row_max == nullptr) continue;
    const Int64 stat = row_index(params, task.b, at.head, at.query);
    call.row_max[stat] = end.row.m;
    call.row_sum[stat] = end.row.l;
  }
}

}  // namespace

extern const DecodeKernels kDecodeKernels;
const DecodeKernels kDecodeKernels = {kMostRows, kGroupRows, run, merge_parts};

}  // namespace forge::cpu::FORGE_TARGET
