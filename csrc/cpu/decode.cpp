// Few query rows against many keys, compiled once per target. Keys lie in vector lanes, transposed
// in registers on their way in, so k and v are read once, in place, for the whole group: the
// memory's speed is what bounds it. What a task reads, it reads some rows abreast over the width of
// all its heads: the pattern that hardware prefetchers follow (rows of one head alone, far apart,
// they do not).
#include "cpu/decode_kernels.h"
#include "cpu/pack.h"
#include "cpu/scores.h"

namespace forge::cpu::FORGE_TARGET {
namespace {

constexpr int kBlockKeys = 64;
constexpr int kPanelVecs = 16 / kLanes;
constexpr int kPanelKeys = kPanelVecs * kLanes;  // keys read abreast
constexpr int kValueKeys = 16;                   // values read abreast
constexpr int kMostHeadSize = 512;
constexpr int kRowsAtOnce = 4;
constexpr int kMostRows = 16;   // a kv head
constexpr int kGroupRows = 64;  // of all heads that a group reads abreast

FORGE_INLINE Int64 min_of(Int64 a, Int64 b) { return a < b ? a : b; }
FORGE_INLINE Int64 max_of(Int64 a, Int64 b) { return a > b ? a : b; }

// Rows of keys or values.
struct KeyBlock {
  const Real* first;
  Int64 stride;  // from key to key
  Int64 head_stride;
  int count;
};

FORGE_INLINE void prefetch_rows(const Real* first, Int64 stride, int count, Int64 hd) {
  for (int row = 0; row < count; ++row) {
    for (Int64 d = 0; d < hd; d += 16) __builtin_prefetch(first + row * stride + d, 0, 3);
  }
}

// scores[r][key] for the keys of a panel: hd times kPanelKeys, keys in lanes.
template <bool Capped, int Rows>
FORGE_NOINLINE void score_panel(const Real* const* q, const Real* panel, Int64 hd,
                                const ScoreMap& map, Real* scores) {
  // As many vectors side by side as keep both the chains' latency hidden and their sums in
  // registers.
  constexpr int kVecs = Rows <= 2 || kPanelVecs < 2 ? kPanelVecs : 2;
  for (int c = 0; c < kPanelVecs; c += kVecs) {
    Vec acc[Rows][kVecs];
    dot_rows(q, panel + c * kLanes, kPanelKeys, hd, acc);
    FORGE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      FORGE_UNROLL
      for (int i = 0; i < kVecs; ++i) {
        store(scores + r * kBlockKeys + (c + i) * kLanes, score_of<Capped>(acc[r][i], map));
      }
    }
  }
}

// Keys, at most kPanelKeys, into a panel. Lanes past the last key repeat it.
FORGE_NOINLINE void fill_panel(const KeyBlock& k, Int64 hd, Real* panel) {
  for (int c = 0; c < kPanelKeys; c += kLanes) {
    const Real* rows[kLanes];
    for (int i = 0; i < kLanes; ++i) rows[i] = k.first + min_of(c + i, k.count - 1) * k.stride;
    rows_to_lanes(rows, hd, panel + c, kPanelKeys);
  }
}

// o[r] = o[r] * alpha[r] + sum over the keys of p[r][key] v[key], o in the partial rows.
template <int Rows, int Vecs>
FORGE_INLINE void add_channels(const Real* p, const KeyBlock& v, Int64 d, Int64 hd,
                               const Real* alpha, Real* const* partial) {
  Vec acc[Rows][Vecs];
  FORGE_UNROLL
  for (int r = 0; r < Rows; ++r) {
    FORGE_UNROLL
    for (int c = 0; c < Vecs; ++c) acc[r][c] = Vec{};
  }
  const Real* row = v.first + d;
  for (int key = 0; key < v.count; ++key, row += v.stride) {
    Vec value[Vecs];
    FORGE_UNROLL
    for (int c = 0; c < Vecs; ++c) {
      value[c] = Vecs > 1 ? load(row + c * kLanes) : load_within(row, 0, hd - d);
    }
    FORGE_UNROLL
    for (int r = 0; r < Rows; ++r) {
      const Vec weight = broadcast(p[r * kBlockKeys + key]);
      FORGE_UNROLL
      for (int c = 0; c < Vecs; ++c) acc[r][c] = fma(weight, value[c], acc[r][c]);
    }
  }
  FORGE_UNROLL
  for (int r = 0; r < Rows; ++r) {
    FORGE_UNROLL
    for (int c = 0; c < Vecs; ++c) {
      Real* at = partial[r] + kPartialHead + d + c * kLanes;
      store(at, fma(load(at), broadcast(alpha[r]), acc[r][c]));
    }
  }
}

template <int Rows>
FORGE_NOINLINE void add_keys(const Real* p, const KeyBlock& v, Int64 hd, const Real* alpha,
                             Real* const* partial) {
  constexpr int kVecs = Rows == 1 ? 4 : 2;
  Int64 d = 0;
  for (; d + kVecs * kLanes <= hd; d += kVecs * kLanes) {
    add_channels<Rows, kVecs>(p, v, d, hd, alpha, partial);
  }
  for (; d < hd; d += kLanes) add_channels<Rows, 1>(p, v, d, hd, alpha, partial);
}

// One row's scores of a block become p; m and l, the first of its partial row, move on. Returns
// what its sums so far are to be multiplied with. [from, to): the keys of the block that the row
// sees.
FORGE_INLINE Real softmax_row(Real* scores, int from, int to, Real* partial) {
  Real* m = partial;
  Real* l = partial + 1;
  const Vec lowest = broadcast(-__builtin_inff());
  const int padded = static_cast<int>(round_up(to, kLanes));
  Vec top = lowest;
  for (int key = 0; key < padded; key += kLanes) {
    const IntVec at = lane_numbers() + key;
    const Vec s = select((at >= from) & (at < to), load(scores + key), lowest);
    store(scores + key, s);
    top = max(s, top);
  }
  const Real largest = max_of_lanes(top), before = *m;
  *m = largest > before ? largest : before;
  // A row of nothing but -inf so far: any finite base gives p = 0 where -inf - -inf would give NaN.
  const Vec base = broadcast(*m == -__builtin_inff() ? 0 : *m);
  const Real alpha = exp_of_nonpositive(broadcast(before) - base)[0];
  Vec sum{};
  for (int key = 0; key < padded; key += kLanes) {
    const Vec p = exp_of_nonpositive(load(scores + key) - base);
    store(scores + key, p);
    sum = sum + p;
  }
  *l = *l * alpha + sum_of_lanes(sum);
  return alpha;
}

// Rows of some kv heads, head by head, that go through the keys together.
struct RowGroup {
  Int64 head_begin;
  int heads;
  int rows;  // a head
  const Real* q[kGroupRows];
  Real* partial[kGroupRows];
  IndexRange keys[kGroupRows];  // visible
};

// scores[row][key] of all rows of a group against a block of keys. k.first is row 0's, head 0's.
template <bool Capped>
void score_block(const RowGroup& group, const KeyBlock& k, Int64 hd, const ScoreMap& map,
                 Real* scores) {
  alignas(64) Real panel[(kMostHeadSize + kLanes) * kPanelKeys];
  constexpr int kStep = kPanelKeys;
  for (int key = 0; key < k.count; key += kStep) {
    for (int head = 0; head < group.heads; ++head) {
      const KeyBlock keys = {k.first + (group.head_begin + head) * k.head_stride + key * k.stride,
                             k.stride, k.head_stride,
                             static_cast<int>(min_of(kStep, k.count - key))};
      prefetch_rows(keys.first + kStep * k.stride, k.stride,
                    static_cast<int>(min_of(kStep, k.count - key - kStep)), hd);
      fill_panel(keys, hd, panel);
      for (int r = 0; r < group.rows; r += kRowsAtOnce) {
        const int row = head * group.rows + r;
        const Real* const* q = group.q + row;
        Real* to = scores + row * kBlockKeys + key;
        switch (group.rows - r) {
          case 1:
            score_panel<Capped, 1>(q, panel, hd, map, to);
            break;
          case 2:
            score_panel<Capped, 2>(q, panel, hd, map, to);
            break;
          case 3:
            score_panel<Capped, 3>(q, panel, hd, map, to);
            break;
          default:
            score_panel<Capped, 4>(q, panel, hd, map, to);
        }
      }
    }
  }
}

// Adds p v of a block in which every row sees every key.
void add_block(const RowGroup& group, const KeyBlock& v, Int64 hd, const Real* scores,
               const Real* alpha) {
  Real ones[kRowsAtOnce] = {1, 1, 1, 1};
  for (int key = 0; key < v.count; key += kValueKeys) {
    for (int head = 0; head < group.heads; ++head) {
      const KeyBlock values = {v.first + (group.head_begin + head) * v.head_stride + key * v.stride,
                               v.stride, v.head_stride,
                               static_cast<int>(min_of(kValueKeys, v.count - key))};
      prefetch_rows(values.first + kValueKeys * v.stride, v.stride,
                    static_cast<int>(min_of(kValueKeys, v.count - key - kValueKeys)), hd);
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

// The rows of a group against the keys [begin, begin + k.count).
void run_block(const RowGroup& group, const KeyBlock& k, const KeyBlock& v, Int64 begin, Int64 hd,
               const ScoreMap& map) {
  alignas(64) Real scores[kGroupRows * kBlockKeys];
  if (map.softcap > 0) {
    score_block<true>(group, k, hd, map, scores);
  } else {
    score_block<false>(group, k, hd, map, scores);
  }
  const int rows = group.heads * group.rows;
  Real alpha[kGroupRows];
  int from[kGroupRows], to[kGroupRows];
  bool whole = true;
  for (int row = 0; row < rows; ++row) {
    from[row] = static_cast<int>(max_of(group.keys[row].lo - begin, 0));
    to[row] = static_cast<int>(min_of(group.keys[row].hi - begin + 1, k.count));
    if (from[row] >= to[row]) from[row] = to[row] = 0;
    whole = whole && from[row] == 0 && to[row] == k.count;
    alpha[row] = softmax_row(scores + row * kBlockKeys, from[row], to[row], group.partial[row]);
  }
  if (whole) {
    add_block(group, v, hd, scores, alpha);
    return;
  }
  // An edge of the mask: each row by itself, so that it meets no value it does not see.
  for (int row = 0; row < rows; ++row) {
    const Int64 head = group.head_begin + row / group.rows;
    const KeyBlock seen = {v.first + head * v.head_stride + from[row] * v.stride, v.stride,
                           v.head_stride, to[row] - from[row]};
    add_keys<1>(scores + row * kBlockKeys + from[row], seen, hd, alpha + row, group.partial + row);
  }
}

void start_group(const ForwardCall& call, const DecodeTask& task, Int64 head_begin, Int64 heads,
                 RowGroup& group) {
  const AttnParams& params = call.params;
  const Int64 rows = call.rep * params.Tq, row_floats = partial_row_floats(params.hd);
  group.head_begin = head_begin;
  group.heads = static_cast<int>(heads);
  group.rows = static_cast<int>(rows);
  for (Int64 row = 0; row < heads * rows; ++row) {
    const Int64 head = head_begin + row / rows, r = row % rows, i = r / call.rep;
    const Int64 h = head * call.rep + r % call.rep;
    Real* partial = task.partial + (head * rows + r) * row_floats;
    for (Int64 at = 0; at < row_floats; ++at) partial[at] = 0;
    partial[0] = -__builtin_inff();
    group.q[row] = call.q + task.b * params.q.batch + i * params.q.row + h * params.q.head;
    group.partial[row] = partial;
    group.keys[row] = visible_keys(task.band, i);
  }
}

void run(const ForwardCall& call, const DecodeTask& task) {
  const AttnParams& params = call.params;
  const ScoreMap map = score_map(params.scale, params.softcap);
  const Int64 heads_at_once = max_of(1, kGroupRows / (call.rep * params.Tq));
  for (Int64 head = task.head_begin; head < task.head_end; head += heads_at_once) {
    RowGroup group;
    start_group(call, task, head, min_of(heads_at_once, task.head_end - head), group);
    for (Int64 begin = task.key_begin; begin < task.key_end; begin += kBlockKeys) {
      const int count = static_cast<int>(min_of(kBlockKeys, task.key_end - begin));
      const KeyBlock k = {call.k + task.b * params.k.batch + begin * params.k.row, params.k.row,
                          params.k.head, count};
      const KeyBlock v = {call.v + task.b * params.v.batch + begin * params.v.row, params.v.row,
                          params.v.head, count};
      run_block(group, k, v, begin, params.hd, map);
    }
  }
}

void combine(const ForwardCall& call, const CombineTask& task) {
  const AttnParams& params = call.params;
  const Int64 hd = params.hd, row_floats = partial_row_floats(hd);
  for (Int64 row = task.row_begin; row < task.row_end; ++row) {
    const Real* partial = task.partial + (row - task.row_begin) * row_floats;
    const Int64 i = row / call.rep, h = task.kv_head * call.rep + row % call.rep;
    const Int64 at = (task.b * params.H + h) * params.Tq + i;
    Real* o = call.o + task.b * params.o.batch + i * params.o.row + h * params.o.head;
    const IndexRange keys = visible_keys(task.band, i);
    if (keys.lo > keys.hi) {
      call.row_max[at] = -__builtin_inff();
      call.row_sum[at] = 0;
      for (Int64 d = 0; d < hd; d += kLanes) store_within(o, d, hd, Vec{});
      continue;
    }
    Real m = -__builtin_inff(), l = 0;
    for (Int64 split = 0; split < task.splits; ++split) {
      const Real part = partial[split * task.split_floats];
      m = part > m ? part : m;
    }
    const Real base = m == -__builtin_inff() ? 0 : m;
    for (Int64 d = 0; d < hd; d += kLanes) {
      Vec sum{};
      l = 0;
      for (Int64 split = 0; split < task.splits; ++split) {
        const Real* part = partial + split * task.split_floats;
        const Vec weight = exp_of_nonpositive(broadcast(part[0] - base));
        l += part[1] * weight[0];
        sum = fma(load(part + kPartialHead + d), weight, sum);
      }
      if (l == 0) l = __builtin_nanf("");  // all visible scores are -inf
      store_within(o, d, hd, sum / broadcast(l));
    }
    call.row_max[at] = m;
    call.row_sum[at] = l;
  }
}

}  // namespace

extern const DecodeKernels kDecodeKernels;
const DecodeKernels kDecodeKernels = {kMostRows, kMostHeadSize, run, combine};

}  // namespace forge::cpu::FORGE_TARGET
