// What the fused kernels share: what rows see of a tile, how they are loaded and stored, and the
// scores.
#pragma once

#include "row_group.h"

namespace forge {

// What a simdgroup sees of a tile: the blocks [from, to); and whether each of its rows (or keys)
// sees all of them, which spares it the masks.
struct BlockSpan {
  Int32 from;
  Int32 to;
  bool whole;
};

METAL_FUNC bool is_seen_whole(Range left, Range right, Int32 begin, Int32 end) {
  return metal::simd_all(left.begin <= begin && left.end >= end && right.begin <= begin &&
                         right.end >= end);
}

// seen: by any row of the simdgroup; left, right: by those of the lane, which may be one.
METAL_FUNC BlockSpan block_span(Range seen, Range left, Range right, Int32 first, Int32 size) {
  BlockSpan span;
  span.from = larger(seen.begin - first, 0) / kBlockSize;
  span.to = (larger(smaller(seen.end - first, size), 0) + kBlockSize - 1) / kBlockSize;
  span.whole =
      is_seen_whole(left, right, first + span.from * kBlockSize, first + span.to * kBlockSize);
  if (hides_pairs()) span.whole = false;
  return span;
}

METAL_FUNC bool holds(BlockSpan span, Int32 block) { return block >= span.from && block < span.to; }

// Where several simdgroups share a row block, each has the dot products over its own channels. They
// leave them in `exchange` before a barrier and add them in the order of the parts after it.
METAL_FUNC void leave_block(threadgroup float* exchange, Int32 slot, uint lane, Block x) {
  threadgroup float* to = exchange + (slot * kSimdgroupWidth + Int32(lane)) * 2;
  *reinterpret_cast<threadgroup float2*>(to) = x;
}

template <int kParts>
METAL_FUNC Block sum_of_parts(threadgroup const float* exchange, Int32 slot, Int32 part_slots,
                              uint lane) {
  Block sum = two_at(exchange + (slot * kSimdgroupWidth + Int32(lane)) * 2);
#pragma clang loop unroll(full)
  for (Int32 part = 1; part < kParts; ++part) {
    sum += two_at(exchange + ((part * part_slots + slot) * kSimdgroupWidth + Int32(lane)) * 2);
  }
  return sum;
}

// Which pairs of its row a lane knows to be seen: keys of a range or, where single pairs may be
// hidden, the lane's own two of a block.
struct Sight {
  Range keys;
  uint bits;
};

METAL_FUNC Sight sight_of(Range keys, uint bits) {
  Sight sight = {keys, bits};
  return sight;
}

// Whether the lane's row sees key j of a block that begins with `key`.
METAL_FUNC bool sees(Sight sight, Int32 key, Int32 j, Lane at) {
  if (!hides_pairs()) return contains(sight.keys, key + j);
  uint bits = metal::simd_shuffle(sight.bits, lane_holding(at.row, j));
  return ((bits >> uint(j % 2)) & 1u) != 0;
}

// By selection: x where the lane's row sees its two keys.
METAL_FUNC Block where_seen(Range seen, Int32 key, Block x, float hidden) {
  return Block(contains(seen, key) ? x.x : hidden, contains(seen, key + 1) ? x.y : hidden);
}

// A run of channels of a row in device memory, across: from `channel` on.
template <int N>
METAL_FUNC void load_row(Source row, Int32 channel, Int32 hd, Lane at, thread Blocks<N>& to) {
#pragma clang loop unroll(full)
  for (Int32 first = 0; first < N; first += 4) {
    Int32 size = group_size<N>(first);
    Int32 c = channel + first * kBlockSize + size * at.column;
    float4 x = load_some(row, c, hd, size == 1 ? 2 : 4);
    if (size == 1) {
      to.at[first] = Block(x.x, x.y);
    } else if (size == 2) {
      to.at[first] = Block(x.x, x.z);
      to.at[first + 1] = Block(x.y, x.w);
    } else {
      float4 y = load_four(row, c + 4, hd);
      to.at[first] = Block(x.x, y.x);
      to.at[first + 1] = Block(x.y, y.y);
      to.at[first + 2] = Block(x.z, y.z);
      to.at[first + 3] = Block(x.w, y.w);
    }
  }
}

template <int N>
METAL_FUNC void store_row(Target row, Int32 channel, Int32 hd, Lane at,
                          thread const Blocks<N>& from) {
#pragma clang loop unroll(full)
  for (Int32 first = 0; first < N; first += 4) {
    Int32 size = group_size<N>(first);
    Int32 c = channel + first * kBlockSize + size * at.column;
    if (size == 1) {
      store_some(row, c, hd, 2, float4(from.at[first].x, from.at[first].y, 0.0f, 0.0f));
    } else if (size == 2) {
      store_four(
          row, c, hd,
          float4(from.at[first].x, from.at[first + 1].x, from.at[first].y, from.at[first + 1].y));
    } else {
      store_four(row, c, hd,
                 float4(from.at[first].x, from.at[first + 1].x, from.at[first + 2].x,
                        from.at[first + 3].x));
      store_four(row, c + 4, hd,
                 float4(from.at[first].y, from.at[first + 1].y, from.at[first + 2].y,
                        from.at[first + 3].y));
    }
  }
}

// A run of channels of two rows in device memory, down: from `channel` on.
template <int N>
METAL_FUNC void load_columns(Source left, Source right, Int32 channel, Int32 hd, Lane at,
                             thread Blocks<N>& to) {
#pragma clang loop unroll(full)
  for (Int32 first = 0; first < N; first += 4) {
    Int32 size = group_size<N>(first);
    Int32 c = channel + first * kBlockSize + size * at.row;
    float4 x = load_some(left, c, hd, size);
    float4 y = load_some(right, c, hd, size);
    to.at[first] = Block(x.x, y.x);
    if (size > 1) to.at[first + 1] = Block(x.y, y.y);
    if (size > 2) to.at[first + 2] = Block(x.z, y.z);
    if (size > 2) to.at[first + 3] = Block(x.w, y.w);
  }
}

// A run of channels of a row of a tile, across; the tile starts at the run.
template <int N, typename T>
METAL_FUNC void load_row(threadgroup const T* row, Lane at, thread Blocks<N>& to) {
#pragma clang loop unroll(full)
  for (Int32 first = 0; first < N; first += 4) {
    Blocks<4> group;
    load_across<N>(row, first, at.column, group);
#pragma clang loop unroll(full)
    for (Int32 n = 0; n < group_size<N>(first); ++n) to.at[first + n] = group.at[n];
  }
}

// sums + weight * values, for those values that are not finite.
template <int N>
METAL_FUNC void add_hidden(float weight, Blocks<4> values, bool shown, Int32 first,
                           thread Blocks<N>& sums) {
#pragma clang loop unroll(full)
  for (Int32 n = 0; n < group_size<N>(first); ++n) {
    Block sum = sums.at[first + n];
    sums.at[first + n] = Block(with_hidden(sum.x, weight, values.at[n].x, shown),
                               with_hidden(sum.y, weight, values.at[n].y, shown));
  }
}

// sums + w x of 8 rows of a tile, the lane's one at x, for what of x is not finite, where the
// lane's row sees it. Rare, and slow: a tile that holds NaN or infinity, at the edge of the mask.
template <int N, typename T>
METAL_FUNC void add_hidden_rows(Block w, Sight seen, Int32 key, threadgroup const T* x,
                                Int32 stride, Lane at, thread Blocks<N>& sums) {
#pragma clang loop unroll(disable)
  for (Int32 j = 0; j < kBlockSize; ++j) {
    ushort lane = lane_holding(at.row, j);
    float even = metal::simd_shuffle(w.x, lane);
    float odd = metal::simd_shuffle(w.y, lane);
    bool shown = sees(seen, key, j, at);
#pragma clang loop unroll(full)
    for (Int32 first = 0; first < N; first += 4) {
      Blocks<4> values;
      load_across<N>(x + (j - at.row) * stride, first, at.column, values);
      add_hidden(j % 2 == 0 ? even : odd, values, shown, first, sums);
    }
  }
}

// a . b of a row block with 8 rows of a tile, over the channels of `a`; `tile` starts at the first
// of both. The products of every sweep start from zero and run in this order.
template <int N, typename T>
METAL_FUNC Block dot_rows(thread const Blocks<N>& a, threadgroup const T* tile, Int32 stride,
                          Lane at) {
  threadgroup const T* left = tile + at.column * stride;
  Block sum = Block(0.0f, 0.0f);
#pragma clang loop unroll(full)
  for (Int32 first = 0; first < N; first += 4) {
    Blocks<4> b;
    load_down<N>(left, left + stride, first, at.row, b);
#pragma clang loop unroll(full)
    for (Int32 n = 0; n < group_size<N>(first); ++n) {
      sum = multiply_add(a.at[first + n], b.at[n], sum);
    }
  }
  return sum;
}

// The scores of a row block against one block of keys. t: tanh(x / softcap), for the backward.
struct Scores {
  Block s;
  Block t;
};

struct ScoreOptions {
  float scale;
  float softcap;
  float inverse_softcap;
};

METAL_FUNC ScoreOptions score_options(constant AttnParams& params, constant AttnGrid& grid) {
  ScoreOptions options;
  options.scale = params.scale;
  options.softcap = params.softcap;
  options.inverse_softcap = grid.inverse_softcap;
  return options;
}

METAL_FUNC Scores scores_of(Block dot, ScoreOptions options) {
  Scores scores;
  Block x = Block(dot.x * options.scale, dot.y * options.scale);
  scores.s = x;
  scores.t = Block(0.0f, 0.0f);
  if (has_softcap) {
    scores.t =
        Block(attn_tanh(x.x * options.inverse_softcap), attn_tanh(x.y * options.inverse_softcap));
    scores.s = Block(options.softcap * scores.t.x, options.softcap * scores.t.y);
  }
  return scores;
}

// exp(t) for t <= 0. The hardware's exp2 (4 ulp by the language's rules, one instruction), not
// attn_exp, whose two dozen would cost as much as a fifth of the products at hd = 64. The product
// is rounded: an error of |t| / 2 ulp of exp(t), at most 0.4 ulp of 1.
METAL_FUNC float exp_of(float t) { return metal::exp2(t * 1.44269504f); }
METAL_FUNC Block exp_of(Block t) { return Block(exp_of(t.x), exp_of(t.y)); }

// p = exp(s - m) / l from the saved statistics; a rounding above zero is none, NaN stays. One
// element after the other: a vector of two equal numbers would take a register more.
METAL_FUNC Block probabilities(Block s, float m, float inverse_l) {
  Block t = Block(s.x - m, s.y - m);
  if (t.x > 0.0f) t.x = 0.0f;
  if (t.y > 0.0f) t.y = 0.0f;
  Block p = exp_of(t);
  return Block(p.x * inverse_l, p.y * inverse_l);
}

}  // namespace forge
