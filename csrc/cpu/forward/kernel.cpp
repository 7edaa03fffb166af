// The forward of one task, compiled once per target: online softmax over key tiles.
#include "cpu/forward/kernel.h"

#include <algorithm>
#include <cstring>

#include "core/stop.h"
#include "cpu/arena.h"
#include "cpu/bias.h"
#include "cpu/forward/tile.h"
#include "cpu/pack.h"

namespace forge::cpu::FORGE_TARGET {
namespace {

// A worker's scratch.
struct Workspace {
  Real* q;           // [blocks][hd_pad][kRowBlock]
  Real* o;           // [blocks][hv_pad][kRowBlock]
  Real* m;           // [rows]
  Real* l;           // [rows]
  IndexRange* seen;  // [rows]
  Real* k;           // [tile_keys + kStep][k_stride]
  Real* v;           // [panels][tile_keys][kStep], with slack
  Real* scores;      // [tile_keys + kStep][kRowBlock]
  PairRow* pairs;    // [rows]; only where there is a bias or a mask
  Real* bias;        // as scores, likewise
  Int64 hd_pad;
  Int64 hv_pad;
  Int64 k_stride;
  Int64 v_panel;
  std::size_t bytes;
};

FORGE_INLINE Workspace workspace(char* base, const ForwardCall& call, Int64 rows) {
  Workspace w;
  Arena arena(base);
  const AttnParams& params = call.params;
  const Int64 keys = tile_keys(widest_head(params)), padded_rows = round_up(rows, kRowBlock);
  w.hd_pad = round_up(params.hd, kLanes);
  w.hv_pad = round_up(params.hv, kLanes);
  w.k_stride = round_up(params.hd, kLanes);
  w.v_panel = round_up(keys * kStep + kLanes, 16);
  w.q = arena.take<Real>(padded_rows * w.hd_pad + kLanes * kRowBlock);
  w.o = arena.take<Real>(padded_rows * w.hv_pad);
  w.m = arena.take<Real>(padded_rows);
  w.l = arena.take<Real>(padded_rows);
  w.seen = arena.take<IndexRange>(padded_rows);
  w.k = arena.take<Real>((keys + kStep) * w.k_stride);
  w.v = arena.take<Real>(round_up(params.hv, kStep) / kStep * w.v_panel);
  w.scores = arena.take<Real>((keys + kStep) * kRowBlock);
  const bool pairs = call.pairs.given();
  w.pairs = arena.take<PairRow>(pairs ? padded_rows : 0);
  w.bias = arena.take<Real>(pairs ? (keys + kStep) * kRowBlock : 0);
  w.bytes = static_cast<std::size_t>(arena.used());
  return w;
}

std::size_t scratch_bytes(const ForwardCall& call, Int64 rows) {
  return workspace(nullptr, call, rows).bytes;
}

// Keys of a row block, its dead rows and the lanes past the last row left out.
struct BlockKeys {
  IndexRange any;  // that some row sees, from the first of a class on
  IndexRange all;  // that every row sees
};

struct TaskState {
  const ForwardCall* call;
  const ForwardTask* task;
  Workspace work;
};

FORGE_INLINE RowCursor cursor_at(const TaskState& state, Int64 slot) {
  return row_cursor(state.call->params, state.task->kv_head, state.task->rows.begin + slot);
}

// A row that sees no key, or a lane past the last row: sees whatever the others of its block see.
FORGE_INLINE IndexRange every_key() { return {0, int64_max()}; }

// Nothing added yet.
FORGE_INLINE void clear_sums(const Workspace& work, Int64 index) {
  for (int c = 0; c < kRowVecs; ++c) {
    store(work.m + index * kRowBlock + c * kLanes, broadcast(-__builtin_inff()));
    store(work.l + index * kRowBlock + c * kLanes, Vec{});
  }
}

// Fills the scratch rows of block `index` and returns what they see.
template <typename Stored>
FORGE_NOINLINE BlockKeys start_block(const TaskState& state, const Stored* q, Int64 index) {
  const ForwardTask& task = *state.task;
  const AttnParams& params = state.call->params;
  const Workspace& work = state.work;
  BlockKeys block = {nothing(), every_key()};
  RowCursor at = cursor_at(state, index * kRowBlock);
  const Stored* row = nullptr;
  PairRow pairs = {0, 0};
  for (int c = 0; c < kRowVecs; ++c) {
    const Stored* rows[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      const Int64 slot = index * kRowBlock + c * kLanes + lane;
      const bool there = task.rows.begin + slot < task.rows.end;
      // lanes past the last row repeat it; dead or repeated, their results are dropped
      if (there) {
        row = q + element_offset(params.q, task.b, at.query, at.head);
        pairs = pair_row(state.call->pairs, task.b, at.head, at.query);
      }
      rows[lane] = row;
      if (state.call->pairs.given()) work.pairs[slot] = pairs;
      IndexRange keys = nothing();
      if (there) keys = task.mask.keys(at.query);
      at.next();
      if (is_empty(keys)) {
        keys = every_key();
      } else {
        block.any = hull(block.any, keys);
        block.all = overlap(block.all, keys);
      }
      work.seen[slot] = keys;
    }
    rows_to_lanes(rows, params.hd, work.q + index * work.hd_pad * kRowBlock + c * kLanes,
                  kRowBlock);
  }
  block.any.begin = class_begin(block.any.begin);
  return block;
}

// Keys [begin, begin + count) of the task's kv head, packed.
template <typename Stored>
FORGE_NOINLINE KeyTile pack_tile(const TaskState& state, const Stored* k, const Stored* v,
                                 Int64 begin, int count) {
  const ForwardTask& task = *state.task;
  const AttnParams& params = state.call->params;
  const Workspace& work = state.work;
  k += element_offset(params.k, task.b, begin, task.kv_head);
  v += element_offset(params.v, task.b, begin, task.kv_head);
  copy_rows(k, params.k.row, params.hd, count, count + kStep, work.k, work.k_stride);
  KeyTile tile = {work.k, work.k_stride, work.v, work.v_panel, true};
  tile.v_finite = rows_to_panels<kStep>(v, params.v.row, params.hv, count, work.v, work.v_panel);
  return tile;
}

// Asks for part `index` of `parts` of the keys and values that are packed next.
FORGE_NOINLINE void prefetch_tile(const TaskState& state, IndexRange keys, Int64 index,
                                  Int64 parts) {
  const ForwardCall& call = *state.call;
  const AttnParams& params = call.params;
  const Int64 b = state.task->b, head = state.task->kv_head, bytes = dtype_bytes(call.k.dtype);
  const Int64 share = ceil_div(keys.end - keys.begin, parts);
  const Int64 last = smaller(keys.end, keys.begin + (index + 1) * share);
  const char* k = static_cast<const char*>(call.k.data);
  const char* v = static_cast<const char*>(call.v.data);
  for (Int64 key = keys.begin + index * share; key < last; ++key) {
    prefetch_row(k + element_offset(params.k, b, key, head) * bytes, params.hd * bytes);
    prefetch_row(v + element_offset(params.v, b, key, head) * bytes, params.hv * bytes);
  }
}

// The keys [begin, begin + count) of a tile, as a block's rows see them.
FORGE_NOINLINE KeySpan span_of(const TaskState& state, const BlockKeys& block, Int64 index,
                               Int64 begin, int count) {
  KeySpan span = {0, count, 0, count, {}, {}};
  for (int c = 0; c < kRowVecs; ++c) span.seen_to[c] = broadcast_int(count);
  if (block.all.begin <= begin && begin + count <= block.all.end) return span;
  span.from = count;
  span.to = 0;
  if (is_empty(overlap(block.any, {begin, begin + count}))) return span;
  for (int c = 0; c < kRowVecs; ++c) {
    RealBits seen_from[kLanes], seen_to[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      const IndexRange seen = state.work.seen[index * kRowBlock + c * kLanes + lane];
      seen_from[lane] = key_in_tile(seen.begin, begin, count);
      seen_to[lane] = key_in_tile(seen.end, begin, count);
      if (seen.end == every_key().end) continue;
      span.full_from = std::max(span.full_from, seen_from[lane]);
      span.full_to = std::min(span.full_to, seen_to[lane]);
      if (seen_from[lane] >= seen_to[lane]) continue;
      span.from = std::min(span.from, seen_from[lane]);
      span.to = std::max(span.to, seen_to[lane]);
    }
    std::memcpy(&span.seen_from[c], seen_from, sizeof seen_from);
    std::memcpy(&span.seen_to[c], seen_to, sizeof seen_to);
  }
  span.from = static_cast<int>(class_begin(span.from));
  return span;
}

// The bias tile at hand, which the next block may share.
struct PackedBias {
  Int64 block;
  IndexRange keys;
  BiasTile tile;
};

// The bias and the mask of a block's span of the tile that begins at key `begin`; at: of the tile's
// first key.
FORGE_NOINLINE BiasTile bias_of(const TaskState& state, Int64 index, Int64 begin,
                                const KeySpan& span, PackedBias& packed) {
  const PairRow* rows = state.work.pairs + index * kRowBlock;
  const PairRow* other = state.work.pairs + packed.block * kRowBlock;
  const bool known = packed.keys.begin <= span.from && span.to <= packed.keys.end &&
                     std::memcmp(rows, other, kRowBlock * sizeof *rows) == 0;
  if (!known) {
    packed.block = index;
    packed.keys = {span.from, span.to};
    packed.tile =
        pack_bias(state.call->pairs, rows, kRowBlock, {begin + span.from, begin + span.to},
                  state.work.bias + span.from * kRowBlock, kRowBlock);
    if (packed.tile.at) packed.tile.at = state.work.bias;
  }
  return packed.tile;
}

// What becomes of a block's rows, kLanes of them: where their sums go (null: a lane past the last
// row), times what, and whose are zeros whatever the lanes hold.
template <typename Stored>
struct RowsEnd {
  Stored* o[kLanes];
  Real factor[kLanes];
  RealBits zeroed[kLanes];
};

template <typename Stored>
FORGE_INLINE void store_rows(const TaskState& state, Int64 index, int c,
                             const RowsEnd<Stored>& ends) {
  IntVec zeroed;
  std::memcpy(&zeroed, ends.zeroed, sizeof zeroed);
  lanes_to_rows(state.work.o + index * state.work.hv_pad * kRowBlock + c * kLanes, kRowBlock,
                state.call->params.hv, load(ends.factor), zeroed, ends.o);
}

template <typename Stored>
FORGE_NOINLINE void finish_block(const TaskState& state, Stored* o, const AttnStrides& strides,
                                 Int64 index) {
  const ForwardCall& call = *state.call;
  const ForwardTask& task = *state.task;
  RowCursor at = cursor_at(state, index * kRowBlock);
  for (int c = 0; c < kRowVecs; ++c) {
    RowsEnd<Stored> ends = {};
    for (int lane = 0; lane < kLanes; ++lane, at.next()) {
      const Int64 slot = index * kRowBlock + c * kLanes + lane;
      if (task.rows.begin + slot >= task.rows.end) break;
      const RowEnd end =
          end_of_row(!is_empty(task.mask.keys(at.query)), state.work.m[slot], state.work.l[slot],
                     sink_of(call.sinks, task.b, at.head, at.query));
      const Int64 stat = row_index(call.params, task.b, at.head, at.query);
      if (call.row_max != nullptr) {
        call.row_max[stat] = end.row.m;
        call.row_sum[stat] = end.row.l;
      }
      ends.o[lane] = o + element_offset(strides, task.b, at.query, at.head);
      ends.factor[lane] = end.factor;
      ends.zeroed[lane] = end.row.live ? 0 : -1;
    }
    store_rows(state, index, c, ends);
  }
}

// The part of tile `tile` of the task, which the block's rows may see nothing of. What it holds of
// dead rows is nobody's.
FORGE_NOINLINE void leave_block(const TaskState& state, Int64 index, Int64 tile, bool seen) {
  const Parts& parts = state.task->parts;
  const Int64 rows = state.task->rows.end - state.task->rows.begin;
  for (int c = 0; c < kRowVecs; ++c) {
    RowsEnd<Real> ends = {};
    for (int lane = 0; lane < kLanes; ++lane) {
      const Int64 slot = index * kRowBlock + c * kLanes + lane;
      if (slot >= rows) break;
      Real* part = parts.first + tile * parts.stride + slot * part_floats(state.call->params.hv);
      part[0] = state.work.m[slot];
      part[1] = state.work.l[slot];
      ends.o[lane] = part + kPartHead;
      ends.factor[lane] = 1;
      ends.zeroed[lane] = seen ? 0 : -1;
    }
    store_rows(state, index, c, ends);
  }
}

// A task's blocks of rows.
constexpr int kMaxBlocks = 64;
struct Blocks {
  Int64 count;
  BlockKeys keys[kMaxBlocks];
  bool fresh[kMaxBlocks];
};

// Whether some row of some block sees one of the keys.
bool is_seen(const TaskState& state, const Blocks& blocks, IndexRange keys) {
  if (is_empty(keys)) return false;
  const int count = static_cast<int>(keys.end - keys.begin);
  for (Int64 index = 0; index < blocks.count; ++index) {
    const KeySpan span = span_of(state, blocks.keys[index], index, keys.begin, count);
    if (span.from < span.to) return true;
  }
  return false;
}

// The blocks against keys [keys.begin, keys.end) of a tile. `next`: the keys packed after them.
template <typename Map>
FORGE_INLINE void run_tile(const TaskState& state, IndexRange keys, IndexRange next, Blocks& blocks,
                           const Map& map) {
  const ForwardCall& call = *state.call;
  const Workspace& work = state.work;
  const int count = static_cast<int>(keys.end - keys.begin);
  KeyTile tile = {};
  PackedBias packed = {0, nothing(), {}};
  for (Int64 index = 0; index < blocks.count; ++index) {
    const KeySpan span = span_of(state, blocks.keys[index], index, keys.begin, count);
    BiasTile bias = {nullptr, span.from >= span.to};
    if (!bias.hides_all && call.pairs.given()) {
      bias = bias_of(state, index, keys.begin, span, packed);
    }
    if (!bias.hides_all && !tile.k) {
      tile = with_elements(call.k, [&](const auto* k) {
        return pack_tile(state, k, elements_like(k, call.v), keys.begin, count);
      });
    }
    prefetch_tile(state, next, index, blocks.count);
    if (bias.hides_all) continue;
    const RowBlock block = {work.q + index * work.hd_pad * kRowBlock,
                            work.o + index * work.hv_pad * kRowBlock,
                            work.m + index * kRowBlock,
                            work.l + index * kRowBlock,
                            blocks.fresh[index],
                            bias.at};
    add_tile(block, tile, span, call.params, map, work.scores);
    blocks.fresh[index] = false;
  }
}

template <typename Map>
void run_task(const ForwardCall& call, const ForwardTask& task, char* scratch, const Map& map) {
  const Int64 rows = task.rows.end - task.rows.begin, step = tile_keys(widest_head(call.params));
  const TaskState state = {&call, &task, workspace(scratch, call, rows)};
  Blocks blocks;
  blocks.count = ceil_div(rows, kRowBlock);
  IndexRange any = nothing();
  for (Int64 index = 0; index < blocks.count; ++index) {
    blocks.keys[index] =
        with_elements(call.q, [&](const auto* q) { return start_block(state, q, index); });
    any = hull(any, blocks.keys[index].any);
  }
  const auto start = [&] {
    for (Int64 index = 0; index < blocks.count; ++index) {
      clear_sums(state.work, index);
      blocks.fresh[index] = true;
    }
  };
  const auto keys_of = [&](Int64 tile) {
    const IndexRange keys = overlap({tile * step, (tile + 1) * step}, any);
    return task.mask.ascends() || is_seen(state, blocks, keys) ? keys : nothing();
  };
  const bool leaves_parts = task.parts.first != nullptr;
  const IndexRange tiles =
      leaves_parts ? task.tiles : IndexRange{any.begin / step, ceil_div(any.end, step)};
  start();
  IndexRange next = tiles.begin < tiles.end ? keys_of(tiles.begin) : nothing();
  for (Int64 tile = tiles.begin; tile < tiles.end; ++tile) {
    if (stop_requested()) return;
    const IndexRange keys = next;
    next = tile + 1 < tiles.end ? keys_of(tile + 1) : nothing();
    if (!is_empty(keys)) run_tile(state, keys, next, blocks, map);
    if (!leaves_parts) continue;
    for (Int64 index = 0; index < blocks.count; ++index) {
      leave_block(state, index, tile - tiles.begin, !blocks.fresh[index]);
    }
    start();
  }
  for (Int64 index = 0; index < blocks.count && !leaves_parts; ++index) {
    with_elements(call.o, [&](auto* o) { finish_block(state, o, call.params.o, index); });
    if (call.rounded.data == nullptr) continue;
    const AttnStrides strides = call.rounded.heads_strides();
    with_elements(call.rounded, [&](auto* o) { finish_block(state, o, strides, index); });
  }
}

void run(const ForwardCall& call, const ForwardTask& task, char* scratch) {
  with_score_map(call.params, [&](const auto& map) { run_task(call, task, scratch, map); });
}

}  // namespace

extern const ForwardKernels kForwardKernels;
const ForwardKernels kForwardKernels = {kRowBlock, tile_keys, scratch_bytes, run};

}  // namespace forge::cpu::FORGE_TARGET
