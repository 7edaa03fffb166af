// Few query rows against many keys, compiled once per target. Keys lie in vector lanes, transposed in
// registers on their way in, so k and v are read once, in place, for the whole group: the memory's speed
// is what bounds it. A task walks all its heads over one block of keys before the next block, which
// leaves no page half used, and asks for the next block while it works on this one.
#include "cpu/decode_kernels.h"
#include "cpu/pack.h"
#include "cpu/scores.h"

namespace forge::cpu::FORGE_TARGET {
namespace {

constexpr int kMostBlockKeys = 64;
constexpr int kRowsAtOnce = 4;
constexpr Int64 kMostRows = 16;

FORGE_INLINE Int64 min_of(Int64 a, Int64 b) { return a < b ? a : b; }
FORGE_INLINE Int64 max_of(Int64 a, Int64 b) { return a > b ? a : b; }

// Keys a block: two of them, k and v of all heads, fit a core's L2.
FORGE_INLINE int block_keys(const AttnParams& params) {
  const Int64 row_bytes = params.Hkv * params.hd * static_cast<Int64>(sizeof(Real));
  const Int64 keys = (Int64{64} << 10) / row_bytes / 16 * 16;
  return static_cast<int>(max_of(16, min_of(keys, kMostBlockKeys)));
}

// A block of keys or values of one kv head, and where to prefetch from.
struct KeyBlock {
  const Real* first;
  Int64 stride;
  int count;
  Int64 ahead;  // elements from a row to the row to prefetch; 0: none
};

FORGE_INLINE void prefetch_row(const Real* row, Int64 hd) {
  for (Int64 d = 0; d < hd; d += 16) __builtin_prefetch(row + d);
}

// scores[r][key] for kLanes keys whose rows are given.
template <bool Capped, int Rows>
FORGE_INLINE void score_lanes(const Real* const (&q)[kRowsAtOnce], const Real* const (&k)[kLanes],
                              Int64 hd, const ScoreMap& map, Real* scores) {
  Vec acc[Rows];
  FORGE_UNROLL
  for (int r = 0; r < Rows; ++r) acc[r] = Vec{};
  Int64 d = 0;
  for (; d + kLanes <= hd; d += kLanes) {
    Vec block[kLanes];
    FORGE_UNROLL
    for (int i = 0; i < kLanes; ++i) block[i] = load(k[i] + d);
    transpose(block);
    FORGE_UNROLL
    for (int i = 0; i < kLanes; ++i) {
      FORGE_UNROLL
      for (int r = 0; r < Rows; ++r) acc[r] = fma(broadcast(q[r][d + i]), block[i], acc[r]);
    }
  }
  if (d < hd) {
    Real lanes[kLanes * kLanes];
    rows_to_lanes_at(k, d, hd, lanes);
    for (int i = 0; d + i < hd; ++i) {
      FORGE_UNROLL
      for (int r = 0; r < Rows; ++r) {
        acc[r] = fma(broadcast(q[r][d + i]), load(lanes + i * kLanes), acc[r]);
      }
    }
  }
  FORGE_UNROLL
  for (int r = 0; r < Rows; ++r) store(scores + r * kMostBlockKeys, score_of<Capped>(acc[r], map));
}

template <bool Capped, int Rows>
__attribute__((noinline)) void score_block(const Real* const (&q)[kRowsAtOnce], const KeyBlock& k,
                                           Int64 hd, const ScoreMap& map, Real* scores) {
  for (int key = 0; key < k.count; key += kLanes) {
    const Real* rows[kLanes];
    FORGE_UNROLL
    for (int i = 0; i < kLanes; ++i) {
      // past the end: the last row again, for nobody
      rows[i] = k.first + min_of(key + i, k.count - 1) * k.stride;
    }
    if (k.ahead != 0) {
      for (int i = 0; i < kLanes; ++i) prefetch_row(rows[i] + k.ahead, hd);
    }
    score_lanes<Capped, Rows>(q, rows, hd, map, scores + key);
  }
}

// o[r] = o[r] * alpha[r] + sum over the block's keys of p[r][key] v[key].
template <int Rows, int Vecs>
FORGE_INLINE void add_channels(const Real* p, const KeyBlock& v, Int64 d, Int64 hd,
                               const Real* alpha, Real* const (&o)[kRowsAtOnce]) {
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
      const Vec weight = broadcast(p[r * kMostBlockKeys + key]);
      FORGE_UNROLL
      for (int c = 0; c < Vecs; ++c) acc[r][c] = fma(weight, value[c], acc[r][c]);
    }
  }
  FORGE_UNROLL
  for (int r = 0; r < Rows; ++r) {
    FORGE_UNROLL
    for (int c = 0; c < Vecs; ++c) {
      Real* at = o[r] + d + c * kLanes;
      store(at, fma(load(at), broadcast(alpha[r]), acc[r][c]));
    }
  }
}

template <int Rows>
__attribute__((noinline)) void add_block(const Real* p, const KeyBlock& v, Int64 hd,
                                         const Real* alpha, Real* const (&o)[kRowsAtOnce]) {
  constexpr int kVecs = Rows == 1 ? 4 : 2;
  if (v.ahead != 0) {
    for (int key = 0; key < v.count; ++key) prefetch_row(v.first + key * v.stride + v.ahead, hd);
  }
  Int64 d = 0;
  for (; d + kVecs * kLanes <= hd; d += kVecs * kLanes) {
    add_channels<Rows, kVecs>(p, v, d, hd, alpha, o);
  }
  for (; d < hd; d += kLanes) add_channels<Rows, 1>(p, v, d, hd, alpha, o);
}

// One row's scores of a block become p; m and l move on. Returns what its sums so far are to be
// multiplied with. [from, to): the keys of the block that the row sees.
FORGE_INLINE Real softmax_row(Real* scores, int from, int to, Real* m, Real* l) {
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

// The rows that one pass over a block's keys serves.
struct RowGroup {
  int count;                          // 1 to kRowsAtOnce
  const Real* q[kRowsAtOnce];
  Real* partial[kRowsAtOnce];
  IndexRange keys[kRowsAtOnce];       // visible, within the task
};

template <bool Capped>
FORGE_INLINE void score_group(const RowGroup& rows, const KeyBlock& k, Int64 hd, const ScoreMap& map,
                              Real* scores) {
  switch (rows.count) {
    case 1:
      return score_block<Capped, 1>(rows.q, k, hd, map, scores);
    case 2:
      return score_block<Capped, 2>(rows.q, k, hd, map, scores);
    case 3:
      return score_block<Capped, 3>(rows.q, k, hd, map, scores);
    default:
      return score_block<Capped, 4>(rows.q, k, hd, map, scores);
  }
}

FORGE_INLINE void add_group(const RowGroup& rows, const Real* p, const KeyBlock& v, Int64 hd,
                            const Real* alpha) {
  Real* o[kRowsAtOnce];
  for (int r = 0; r < rows.count; ++r) o[r] = rows.partial[r] + kPartialHead;
  switch (rows.count) {
    case 1:
      return add_block<1>(p, v, hd, alpha, o);
    case 2:
      return add_block<2>(p, v, hd, alpha, o);
    case 3:
      return add_block<3>(p, v, hd, alpha, o);
    default:
      return add_block<4>(p, v, hd, alpha, o);
  }
}

// The rows of a group against keys [begin, begin + k.count).
void run_block(const RowGroup& rows, const KeyBlock& k, const KeyBlock& v, Int64 begin, Int64 hd,
               const ScoreMap& map) {
  alignas(64) Real scores[kRowsAtOnce * kMostBlockKeys];
  if (map.softcap > 0) {
    score_group<true>(rows, k, hd, map, scores);
  } else {
    score_group<false>(rows, k, hd, map, scores);
  }
  Real alpha[kRowsAtOnce];
  int from[kRowsAtOnce], to[kRowsAtOnce];
  bool whole = true;
  for (int r = 0; r < rows.count; ++r) {
    from[r] = static_cast<int>(max_of(rows.keys[r].lo - begin, 0));
    to[r] = static_cast<int>(min_of(rows.keys[r].hi - begin + 1, k.count));
    if (from[r] >= to[r]) from[r] = to[r] = 0;
    whole = whole && from[r] == 0 && to[r] == k.count;
    Real* partial = rows.partial[r];
    alpha[r] = softmax_row(scores + r * kMostBlockKeys, from[r], to[r], partial, partial + 1);
  }
  if (whole) {
    add_group(rows, scores, v, hd, alpha);
    return;
  }
  // An edge of the mask: each row by itself, so that it meets no value it does not see.
  for (int r = 0; r < rows.count; ++r) {
    Real* const o[kRowsAtOnce] = {rows.partial[r] + kPartialHead};
    const KeyBlock seen = {v.first + from[r] * v.stride, v.stride, to[r] - from[r],
                           r == 0 ? v.ahead : 0};
    add_block<1>(scores + r * kMostBlockKeys + from[r], seen, hd, alpha + r, o);
  }
}

void run(const ForwardCall& call, const DecodeTask& task) {
  const AttnParams& params = call.params;
  const Int64 hd = params.hd, rows = call.rep * params.Tq, row_floats = partial_row_floats(hd);
  const ScoreMap map = score_map(params.scale, params.softcap);
  const int step = block_keys(params);
  for (Int64 row = task.head_begin * rows; row < task.head_end * rows; ++row) {
    Real* partial = task.partial + row * row_floats;
    for (Int64 at = 0; at < row_floats; ++at) partial[at] = 0;
    partial[0] = -__builtin_inff();
  }
  for (Int64 begin = task.key_begin; begin < task.key_end; begin += step) {
    const int count = static_cast<int>(min_of(step, task.key_end - begin));
    const bool more = begin + 2 * step <= task.key_end;  // only whole blocks are asked for
    for (Int64 head = task.head_begin; head < task.head_end; ++head) {
      KeyBlock k = {call.k + task.b * params.k.batch + begin * params.k.row + head * params.k.head,
                    params.k.row, count, more ? step * params.k.row : 0};
      KeyBlock v = {call.v + task.b * params.v.batch + begin * params.v.row + head * params.v.head,
                    params.v.row, count, more ? step * params.v.row : 0};
      for (Int64 first = 0; first < rows; first += kRowsAtOnce) {
        RowGroup group;
        group.count = static_cast<int>(min_of(kRowsAtOnce, rows - first));
        bool seen = false;
        for (int r = 0; r < group.count; ++r) {
          const Int64 i = (first + r) / call.rep, h = head * call.rep + (first + r) % call.rep;
          group.q[r] = call.q + task.b * params.q.batch + i * params.q.row + h * params.q.head;
          group.partial[r] = task.partial + (head * rows + first + r) * row_floats;
          group.keys[r] = visible_keys(task.band, i);
          seen = seen || (group.keys[r].lo < begin + count && group.keys[r].hi >= begin);
        }
        if (!seen) continue;
        run_block(group, k, v, begin, hd, map);
        k.ahead = v.ahead = 0;
      }
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
const DecodeKernels kDecodeKernels = {kMostRows, run, combine};

}  // namespace forge::cpu::FORGE_TARGET
