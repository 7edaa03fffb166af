// Few query rows against many keys, compiled once per target. Keys lie in vector lanes, transposed
// in registers on their way in, so k and v are read once, in place, for the whole group: the
// memory's speed is what bounds it. What a task reads, it reads some rows abreast over the width of
// all its heads, and prefetches the next rows meanwhile, in the memory's order: the pattern that
// hardware prefetchers follow (rows of one head alone, far apart, they do not).
#include "cpu/decode/kernel.h"

#include "cpu/attention.h"
#include "cpu/decode/tile.h"
#include "shared/attn_row.h"

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
  Real* partial[kGroupRows];
  IndexRange keys[kGroupRows];  // that each sees
};

// All rows of one kv head; `panel`: room for one.
template <typename Map, typename Stored>
FORGE_INLINE void score_head(const Real* const* q, int rows, const KeyBlock<Stored>& keys,
                             Int64 first_key, Int64 hd, const Map& map, Real* panel, Real* scores) {
  const Real* filled = nullptr;
  if (!kKeysInRegisters || keys.count < kLanes) {
    fill_panel(keys, hd, panel);
    filled = panel;
  }
  for (int r = 0; r < rows; r += kRowsAtOnce) {
    const PairPlace place = {r, first_key};
    Real* to = scores + r * kBlockKeys;
    switch (rows - r) {
      case 1:
        score_rows<1>(q + r, keys, filled, hd, map, place, to);
        break;
      case 2:
        score_rows<2>(q + r, keys, filled, hd, map, place, to);
        break;
      case 3:
        score_rows<3>(q + r, keys, filled, hd, map, place, to);
        break;
      default:
        score_rows<4>(q + r, keys, filled, hd, map, place, to);
    }
  }
}

// scores[row][key] of all rows of a group against a block of keys, the first of them `first_key`.
// k.first is row 0's, head 0's; `next`: the values, read after them.
template <typename Map, typename Stored>
void score_block(const RowGroup& group, const KeyBlock<Stored>& k, const KeyBlock<Stored>& next,
                 Int64 first_key, Int64 hd, const Map& map, Real* scores) {
  alignas(64) Real panel[(kMaxHeadDim + kLanes) * kPanelKeys];
  constexpr int kStep = kPanelKeys;
  for (int key = 0; key < k.count; key += kStep) {
    const KeyBlock<Stored> ahead = key + kStep < k.count
                                       ? rows_from(k, group.head_begin, key + kStep, kStep)
                                       : rows_from(next, group.head_begin, 0, kValueKeys);
    for (int head = 0; head < group.heads; ++head) {
      const KeyBlock<Stored> keys = rows_from(k, group.head_begin + head, key, kStep);
      const int row = head * group.rows;
      Real* to = scores + row * kBlockKeys + key;
      prefetch_share(ahead, head, group.heads, hd);
      if constexpr (kKeysInRegisters) {
        if (group.rows == 1 && head + 1 < group.heads && keys.count == kLanes) {
          ++head;
          prefetch_share(ahead, head, group.heads, hd);
          score_keys<2, 1>(group.q + row, keys, hd, map, {0, first_key + key}, to);
          continue;
        }
      }
      score_head(group.q + row, group.rows, keys, first_key + key, hd, map, panel, to);
    }
  }
}

// Adds p v of a block in which every row sees every key. `next`: the keys read after it.
template <typename Stored>
void add_block(const RowGroup& group, const KeyBlock<Stored>& v, const KeyBlock<Stored>& next,
               Int64 hd, const Real* scores, const Real* alpha) {
  Real ones[kRowsAtOnce] = {1, 1, 1, 1};
  for (int key = 0; key < v.count; key += kValueKeys) {
    const KeyBlock<Stored> ahead =
        key + kValueKeys < v.count ? rows_from(v, group.head_begin, key + kValueKeys, kValueKeys)
                                   : rows_from(next, group.head_begin, 0, kPanelKeys);
    for (int head = 0; head < group.heads; ++head) {
      const KeyBlock<Stored> values = rows_from(v, group.head_begin + head, key, kValueKeys);
      prefetch_share(ahead, head, group.heads, hd);
      for (int r = 0; r < group.rows; r += kRowsAtOnce) {
        const int row = head * group.rows + r;
        const Real* p = scores + row * kBlockKeys + key;
        const Real* factor = key == 0 ? alpha + row : ones;
        Real* const* partial = group.partial + row;
        switch (group.rows - r) {
          case 1:
            add_keys<1>(p, values, hd, factor, partial);
            break;
          case 2:
            add_keys<2>(p, values, hd, factor, partial);
            break;
          case 3:
            add_keys<3>(p, values, hd, factor, partial);
            break;
          default:
            add_keys<4>(p, values, hd, factor, partial);
        }
      }
    }
  }
}

// The rows of a group against the keys [begin, begin + k.count); `next`: the keys after them.
template <typename Map, typename Stored>
void run_block(const RowGroup& group, const KeyBlock<Stored>& k, const KeyBlock<Stored>& v,
               const KeyBlock<Stored>& next, Int64 begin, Int64 hd, const Map& map) {
  alignas(64) Real scores[kGroupRows * kBlockKeys];
  score_block(group, k, v, begin, hd, map, scores);
  const int rows = group.heads * group.rows;
  Real alpha[kGroupRows];
  int from[kGroupRows], to[kGroupRows];
  bool whole = true;
  for (int row = 0; row < rows; ++row) {
    from[row] = key_in_tile(group.keys[row].begin, begin, k.count);
    to[row] = key_in_tile(group.keys[row].end, begin, k.count);
    if (from[row] >= to[row]) from[row] = to[row] = 0;
    whole = whole && from[row] == 0 && to[row] == k.count;
    alpha[row] = softmax_row(scores + row * kBlockKeys, from[row], to[row], group.partial[row]);
  }
  if (whole) {
    add_block(group, v, next, hd, scores, alpha);
    return;
  }
  // An edge of the mask: each row by itself, so that it meets no value it does not see.
  for (int row = 0; row < rows; ++row) {
    const Int64 head = group.head_begin + row / group.rows;
    const KeyBlock<Stored> seen = {v.first + head * v.head_stride + from[row] * v.stride, v.stride,
                                   v.head_stride, to[row] - from[row]};
    add_keys<1>(scores + row * kBlockKeys + from[row], seen, hd, alpha + row, group.partial + row);
  }
}

void start_group(const ForwardCall& call, const DecodeTask& task, Int64 head_begin, Int64 heads,
                 RowGroup& group) {
  const AttnParams& params = call.params;
  const Int64 rows = rows_of_group(params), row_floats = partial_row_floats(params.hd);
  group.head_begin = head_begin;
  group.heads = static_cast<int>(heads);
  group.rows = static_cast<int>(rows);
  Int64 row = 0;
  for (Int64 head = head_begin; head < head_begin + heads; ++head) {
    RowCursor at = row_cursor(params, head, 0);
    for (Int64 r = 0; r < rows; ++r, ++row, at.next()) {
      Real* partial = task.partial + (head * rows + r) * row_floats;
      for (Int64 n = 0; n < row_floats; ++n) partial[n] = 0;
      partial[0] = -__builtin_inff();
      group.q[row] = call.q + element_offset(params.q, task.b, at.query, at.head);
      group.partial[row] = partial;
      group.keys[row] = visible_keys(task.band, at.query);
    }
  }
}

template <typename Map, typename Stored>
void run_task(const ForwardCall& call, const DecodeTask& task, const Stored* k_array,
              const Stored* v_array, const Map& map) {
  const AttnParams& params = call.params;
  const Int64 heads_at_once = larger(1, kGroupRows / rows_of_group(params));
  for (Int64 head = task.heads.begin; head < task.heads.end; head += heads_at_once) {
    RowGroup group;
    start_group(call, task, head, smaller(heads_at_once, task.heads.end - head), group);
    for (Int64 begin = task.keys.begin; begin < task.keys.end; begin += kBlockKeys) {
      const int count = static_cast<int>(smaller(kBlockKeys, task.keys.end - begin));
      const KeyBlock<Stored> k = {k_array + element_offset(params.k, task.b, begin, 0),
                                  params.k.row, params.k.head, count};
      const KeyBlock<Stored> v = {v_array + element_offset(params.v, task.b, begin, 0),
                                  params.v.row, params.v.head, count};
      const KeyBlock<Stored> next = {
          k.first + kBlockKeys * params.k.row, params.k.row, params.k.head,
          static_cast<int>(smaller(kBlockKeys, task.keys.end - begin - count))};
      run_block(group, k, v, next, begin, params.hd, map);
    }
  }
}

void run(const ForwardCall& call, const DecodeTask& task) {
  with_score_map(call.params, [&](const auto& map) { run_task(call, task, call.k, call.v, map); });
}

// The parts of one row, added up in their order: o = sum / l, with m and l of all.
struct RowParts {
  const Real* first;
  Int64 splits;
  Int64 split_floats;
};

template <typename Stored>
FORGE_INLINE AttnRow<Real> combine_row(const RowParts& parts, bool sees_keys, Int64 hd, Stored* o) {
  constexpr int kVecs = 4;
  Real m = -__builtin_inff();
  for (Int64 split = 0; split < parts.splits; ++split) {
    const Real part = parts.first[split * parts.split_floats];
    m = part > m ? part : m;
  }
  const Real base = m == -__builtin_inff() ? 0 : m;
  AttnRow<Real> row{};
  for (Int64 d = 0; d < hd; d += kVecs * kLanes) {
    Vec sum[kVecs] = {};
    Real l = 0;
    for (Int64 split = 0; split < parts.splits; ++split) {
      const Real* part = parts.first + split * parts.split_floats;
      const Vec weight = exp_of_nonpositive(broadcast(part[0] - base));
      l += part[1] * weight[0];
      FORGE_UNROLL
      for (int c = 0; c < kVecs; ++c) {
        const Int64 channel = d + c * kLanes;
        if (channel < hd) sum[c] = fma(load(part + kPartialHead + channel), weight, sum[c]);
      }
    }
    row = finished_row(sees_keys, m, l);
    FORGE_UNROLL
    for (int c = 0; c < kVecs; ++c) {
      store_within(o, d + c * kLanes, hd, row.live ? sum[c] / broadcast(row.l) : Vec{});
    }
  }
  return row;
}

template <typename Stored>
void combine_rows(const ForwardCall& call, const CombineTask& task, Stored* o) {
  const AttnParams& params = call.params;
  RowCursor at = row_cursor(params, task.kv_head, task.rows.begin);
  for (Int64 row = task.rows.begin; row < task.rows.end; ++row, at.next()) {
    const RowParts parts = {task.partial + (row - task.rows.begin) * partial_row_floats(params.hd),
                            task.splits, task.split_floats};
    const AttnRow<Real> end =
        combine_row(parts, !is_empty(visible_keys(task.band, at.query)), params.hd,
                    o + element_offset(params.o, task.b, at.query, at.head));
    const Int64 stat = row_index(params, task.b, at.head, at.query);
    if (call.row_max != nullptr) {
      call.row_max[stat] = end.m;
      call.row_sum[stat] = end.l;
    }
  }
}

void combine(const ForwardCall& call, const CombineTask& task) { combine_rows(call, task, call.o); }

}  // namespace

extern const DecodeKernels kDecodeKernels;
const DecodeKernels kDecodeKernels = {kMostRows, run, combine};

}  // namespace forge::cpu::FORGE_TARGET
