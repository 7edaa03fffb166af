// What the fused kernels share: which rows a threadgroup owns, which blocks of a tile they see, how
// tiles come into threadgroup memory, and the scores.
#pragma once

#include "constants.h"
#include "shared/attn_mask.h"
#include "tiles.h"

namespace forge {

static inline Int32 clamp_to(Int64 x, Int32 end) {
  return Int32(smaller(larger(x, Int64(0)), Int64(end)));
}

// The options that the pipeline was compiled without, as constants for the mask.
static inline AttnParams specialized(AttnParams params) {
  params.causal = has_causal ? 1 : 0;
  if (!has_window) {
    params.window_left = -1;
    params.window_right = -1;
  }
  return params;
}

// Rows of one head of an array in device memory; element 0 of row 0 is at row0.
struct HeadRows {
  device const float* row0;
  Int64 stride;
};

static inline HeadRows head_rows(device const float* array, AttnStrides strides, Int64 b,
                                 Int64 head) {
  HeadRows rows;
  rows.row0 = array + element_offset(strides, b, 0, head);
  rows.stride = strides.row;
  return rows;
}

// Some of the query rows of a kv head's group. Row r is query r / rep of the group's head r % rep:
// all heads of the group share the keys, and neighbouring rows see nearly the same ones.
struct RowTile {
  Int64 b;
  Int64 kv_head;
  Int64 first;  // row
  Int64 end;    // of the group: rep * Tq
  Int64 rep;
  AttnBand band;  // of sequence b
};

static inline RowTile row_tile(AttnParams params, device const AttnRange* ranges, Int64 tile) {
  RowTile rows;
  rows.rep = params.H / params.Hkv;
  rows.end = rows.rep * params.Tq;
  Int64 tiles = tiles_of(rows.end);
  rows.b = tile / (tiles * params.Hkv);
  rows.kv_head = tile / tiles % params.Hkv;
  rows.first = tile % tiles * kQueryRows;
  rows.band = attn_band(params, ranges[rows.b]);
  return rows;
}

static inline Int64 query_of(RowTile rows, Int64 r) { return r / rows.rep; }
static inline Int64 head_of(RowTile rows, Int64 r) {
  return rows.kv_head * rows.rep + r % rows.rep;
}

// Position of row r in [B, H, Tq].
static inline Int64 stat_index(AttnParams params, RowTile rows, Int64 r) {
  return (rows.b * params.H + head_of(rows, r)) * params.Tq + query_of(rows, r);
}

// Of a run of rows, or of keys: what any of them sees and what all of them see.
struct SeenRange {
  IndexRange any;
  IndexRange all;
};

// The keys seen by the rows [first, first + count); both ends move with the row, never backwards.
static inline SeenRange keys_of_rows(RowTile rows, Int64 first, Int32 count) {
  SeenRange seen;
  seen.any = nothing();
  seen.all = nothing();
  if (first >= rows.end) return seen;
  IndexRange top = visible_keys(rows.band, query_of(rows, first));
  IndexRange bottom = visible_keys(rows.band, query_of(rows, smaller(first + count, rows.end) - 1));
  seen.any = index_range(top.begin, bottom.end);
  seen.all = index_range(bottom.begin, top.end);
  return seen;
}

// The queries that see the keys [first, first + count). No query sees all of them where some are
// beyond the keys of the sequence.
static inline SeenRange queries_of_keys(AttnBand band, Int64 Tq, Int64 first, Int32 count) {
  SeenRange seen;
  seen.any = nothing();
  seen.all = nothing();
  Int64 end = first + count;
  Int64 from = larger(first, band.key_begin);
  Int64 to = smaller(end, band.key_end);
  if (from >= to) return seen;
  IndexRange left = visible_queries(band, from, Tq);
  IndexRange right = visible_queries(band, to - 1, Tq);
  seen.any = index_range(left.begin, right.end);
  if (from == first && to == end) seen.all = index_range(right.begin, left.end);
  return seen;
}

// The blocks [from, to) of a tile hold everything that is seen; those in [all_from, all_to) are
// seen whole by all and need no mask.
struct BlockSpan {
  Int32 from;
  Int32 to;
  Int32 all_from;
  Int32 all_to;
};

static inline BlockSpan block_span(SeenRange seen, Int64 first, Int32 blocks) {
  Int32 end = blocks * kBlockSize;
  BlockSpan span;
  span.from = clamp_to(seen.any.begin - first, end) / kBlockSize;
  span.to = (clamp_to(seen.any.end - first, end) + kBlockSize - 1) / kBlockSize;
  span.all_from = (clamp_to(seen.all.begin - first, end) + kBlockSize - 1) / kBlockSize;
  span.all_to = clamp_to(seen.all.end - first, end) / kBlockSize;
  return span;
}

static inline bool holds(BlockSpan span, Int32 block) {
  return block >= span.from && block < span.to;
}
static inline bool needs_mask(BlockSpan span, Int32 block) {
  return block < span.all_from || block >= span.all_to;
}

// Rows [first, first + kRows) of one head go into `tile`; rows outside `rows`, which nobody
// sees, and channels from hd on become zeros. Returns whether all that the lane read is
// finite.
template <int kHd, int kRows, int kSimdgroups>
static inline bool stage_rows(HeadRows head, IndexRange rows, Int64 first, Int32 hd, Lane at,
                              threadgroup float* tile) {
  constexpr Int32 kRuns = (kHd + kSimdgroupWidth - 1) / kSimdgroupWidth;
  bool finite = true;
  for (Int32 run = at.simdgroup; run < kRows * kRuns; run += kSimdgroups) {
    Int32 row = run / kRuns;
    Int32 c = run % kRuns * kSimdgroupWidth + at.lane;
    if (c < kHd) {
      float value = 0.0f;
      if (contains(rows, first + row) && c < hd) value = head.row0[(first + row) * head.stride + c];
      tile[row * tile_stride(kHd) + c] = value;
      finite = finite && metal::isfinite(value);
    }
  }
  return finite;
}

// A simdgroup's vote, and the outcome after the next barrier: is all of the tile finite? Asked only
// where a mask is needed, since 0 * NaN would reach rows that do not see the NaN.
static inline void leave_vote(threadgroup Int32* votes, bool finite, Lane at) {
  bool all = metal::simd_all(finite);
  if (at.lane == 0) votes[at.simdgroup] = all ? 1 : 0;
}

template <int kSimdgroups>
static inline bool unanimous(threadgroup const Int32* votes) {
  Int32 count = 0;
  for (Int32 n = 0; n < kSimdgroups; ++n) count += votes[n];
  return count == kSimdgroups;
}

// Where several simdgroups share a row block, each has the dot products over its own channels. They
// leave them in `exchange` before a barrier and add them in the order of the parts after it.
static inline void leave_block(threadgroup float* exchange, Int32 slot, Lane at, Block x) {
  threadgroup float* to = exchange + (slot * kSimdgroupWidth + at.lane) * 2;
  to[0] = x.x;
  to[1] = x.y;
}

template <int kParts>
static inline Block sum_of_parts(threadgroup const float* exchange, Int32 slot, Int32 part_slots,
                                 Lane at) {
  Block sum = Block(0.0f, 0.0f);
#pragma unroll
  for (Int32 part = 0; part < kParts; ++part) {
    threadgroup const float* from =
        exchange + ((part * part_slots + slot) * kSimdgroupWidth + at.lane) * 2;
    Block x = Block(from[0], from[1]);
    sum = part == 0 ? x : sum + x;
  }
  return sum;
}

// Which of a lane's two elements of a block are seen.
struct Shown {
  bool x;
  bool y;
};

static inline Shown shown_keys(IndexRange seen, Int64 key) {
  Shown shown;
  shown.x = contains(seen, key);
  shown.y = contains(seen, key + 1);
  return shown;
}

static inline Block where(Shown shown, Block x, float hidden) {
  return Block(shown.x ? x.x : hidden, shown.y ? x.y : hidden);
}

// Another lane's share of a block.
struct Share {
  Block x;
  Shown shown;
};

static inline Share share_of(Block x, Shown shown, ushort lane) {
  Share share;
  share.x = Block(metal::simd_shuffle(x.x, lane), metal::simd_shuffle(x.y, lane));
  share.shown.x = metal::simd_shuffle(shown.x ? 1 : 0, lane) != 0;
  share.shown.y = metal::simd_shuffle(shown.y ? 1 : 0, lane) != 0;
  return share;
}

// sum + a b as multiply_add gives it, but leaving out the elements of `a` that are not shown,
// whatever stands in b. Rare: a tile that holds NaN or infinity, at the edge of the mask.
static inline Block add_shown_rows(Block a, Shown shown, threadgroup const float* b, Int32 stride,
                                   Lane at, Block sum) {
  for (Int32 j = 0; j < kBlockSize; j += 2) {
    Share share = share_of(a, shown, lane_holding(at.row, j));
    threadgroup const float* from = b + j * stride + at.column;
    Block weight_x = Block(share.x.x, share.x.x);
    Block weight_y = Block(share.x.y, share.x.y);
    if (share.shown.x) sum = metal::fma(weight_x, Block(from[0], from[1]), sum);
    if (share.shown.y) sum = metal::fma(weight_y, Block(from[stride], from[stride + 1]), sum);
  }
  return sum;
}

// The same for sum + transpose(a) b, leaving out elements of b.
static inline Block add_shown_columns(threadgroup const float* a, Int32 stride, Block b,
                                      Shown shown, Lane at, Block sum) {
  for (Int32 i = 0; i < kBlockSize; ++i) {
    Share share = share_of(b, shown, lane_holding(i, at.column));
    float value = a[i * stride + at.row];
    if (share.shown.x) sum.x = metal::fma(value, share.x.x, sum.x);
    if (share.shown.y) sum.y = metal::fma(value, share.x.y, sum.y);
  }
  return sum;
}

// A tile of keys as a row block sees it.
struct KeyTile {
  Int64 first;      // key
  BlockSpan span;   // of the row block
  IndexRange seen;  // by the lane's row
  bool finite;      // what p is multiplied with
};

static inline Shown shown_of(KeyTile tile, Int32 block, Lane at) {
  return shown_keys(tile.seen, tile.first + block * kBlockSize + at.column);
}

// p times 8 channels of the tile's keys or values; `channels` starts at the first.
template <int N>
static inline Block times_tile(thread const Blocks<N>& p, KeyTile tile,
                               threadgroup const float* channels, Int32 stride, Lane at) {
  Block sum = Block(0.0f, 0.0f);
#pragma unroll
  for (Int32 b = 0; b < N; ++b) {
    if (!holds(tile.span, b)) continue;
    threadgroup const float* from = channels + b * kBlockSize * stride;
    if (tile.finite || !needs_mask(tile.span, b)) {
      sum = multiply_add(p.at[b], load_block(from, stride, at), sum);
    } else {
      sum = add_shown_rows(p.at[b], shown_of(tile, b, at), from, stride, at, sum);
    }
  }
  return sum;
}

// A row block as left operand: this lane's row, from `channel` on.
template <int N>
static inline void load_row(device const float* row, Int32 channel, Int32 hd, Lane at,
                            thread Blocks<N>& to) {
#pragma unroll
  for (Int32 n = 0; n < N; ++n) {
    to.at[n] = load_pair(row, channel + n * kBlockSize + at.column, hd);
  }
}

template <int N>
static inline void set_zero(thread Blocks<N>& blocks) {
#pragma unroll
  for (Int32 n = 0; n < N; ++n) blocks.at[n] = Block(0.0f, 0.0f);
}

// a . b of a row block with 8 rows of a tile, over the channels of `a`; `tile` starts at the first
// of both. The products of every sweep start from zero and run in this order.
template <int N>
static inline Block dot_rows(thread const Blocks<N>& a, threadgroup const float* tile, Int32 stride,
                             Lane at) {
  Block sum = Block(0.0f, 0.0f);
#pragma unroll
  for (Int32 n = 0; n < N; ++n) {
    sum = multiply_add(a.at[n], load_transposed(tile + n * kBlockSize, stride, at), sum);
  }
  return sum;
}

// The scores of a row block against one block of keys. t: tanh(x / softcap), for the backward.
struct Scores {
  Block s;
  Block t;
};

static inline Scores scores_of(Block dot, float scale, float softcap) {
  Scores scores;
  Block x = dot * scale;
  scores.s = x;
  scores.t = Block(0.0f, 0.0f);
  if (has_softcap) {
    scores.t = Block(attn_tanh(x.x / softcap), attn_tanh(x.y / softcap));
    scores.s = softcap * scores.t;
  }
  return scores;
}

// exp(t) for t <= 0. The hardware's exp2 (4 ulp by the language's rules, one instruction), not
// attn_exp, whose two dozen would cost as much as a fifth of the products at hd = 64. The product
// is rounded: an error of |t| / 2 ulp of exp(t), at most 0.4 ulp of 1.
static inline float exp_of(float t) { return metal::exp2(t * 1.44269504f); }
static inline Block exp_of(Block t) { return Block(exp_of(t.x), exp_of(t.y)); }

// p = exp(s - m) / l from the saved statistics; a rounding above zero is none, NaN stays.
static inline Block probabilities(Block s, float m, float inverse_l) {
  Block t = s - m;
  if (t.x > 0.0f) t.x = 0.0f;
  if (t.y > 0.0f) t.y = 0.0f;
  return exp_of(t) * inverse_l;
}

}  // namespace forge
