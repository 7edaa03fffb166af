// The running sums of a row over tiles and runs of keys: the forward's and decode's, in one order.
#pragma once

#include "fused.h"
#include "pairs.h"
#include "shared/attn_row.h"

namespace forge {

// Of one row over some of its keys: the maximum of the scores and the sum of exp(s - m).
struct RowSums {
  float m;
  float l;
};

METAL_FUNC RowSums no_sums() {
  RowSums sums;
  sums.m = -INFINITY;
  sums.l = 0.0f;
  return sums;
}

// exp(m - top), exactly 1 where they are equal: a tile that a row does not see changes no bit of
// it. Where all is -inf so far any finite base gives 0, and -inf - -inf would give NaN.
METAL_FUNC float share_of(float m, float top) {
  float base = top == -INFINITY ? 0.0f : top;
  return m == top ? 1.0f : exp_of(m - base);
}

// Dot products become exp(s - m) with the new maximum; m and l move on. Returns what the sums so
// far are to be multiplied with. Blocks that the span does not hold become zeros. `bits`: of each
// block the lane's two pairs that are seen, where single pairs may be hidden.
template <int N>
METAL_FUNC float softmax_step(ScoreOptions options, BlockSpan span, Range seen, PairRow pairs,
                              Int32 key, thread Blocks<N>& p, thread RowSums& sums,
                              thread uint& bits) {
  float top = -INFINITY;
  bits = 0;
#pragma clang loop unroll(full)
  for (Int32 b = 0; b < N; ++b) {
    Block s = scores_of(p.at[b], options).s;
    if (hides_pairs()) {
      PairBlock block = pair_block(pairs, seen, key + b * kBlockSize);
      s = where_shown(block.bits, s + block.bias, -INFINITY);
      bits |= block.bits << uint(2 * b);
    } else if (!span.whole) {
      s = where_seen(seen, key + b * kBlockSize, s, -INFINITY);
    }
    p.at[b] = holds(span, b) ? s : Block(-INFINITY, -INFINITY);
    top = larger(p.at[b].x, larger(p.at[b].y, top));
  }
  float before = sums.m;
  sums.m = larger(row_max(top), before);
  float base = sums.m == -INFINITY ? 0.0f : sums.m;
  Block sum = Block(0.0f, 0.0f);
#pragma clang loop unroll(full)
  for (Int32 b = 0; b < N; ++b) {
    p.at[b] = Block(exp_of(p.at[b].x - base), exp_of(p.at[b].y - base));
    sum += p.at[b];
  }
  float alpha = share_of(before, sums.m);
  sums.l = metal::fma(sums.l, alpha, row_sum(sum));
  return alpha;
}

// Two runs of keys, the earlier one in `total`, become one.
struct Shares {
  float before;
  float after;
};

METAL_FUNC Shares merge(thread RowSums& total, RowSums run) {
  float m = larger(run.m, total.m);
  Shares shares;
  shares.before = share_of(total.m, m);
  shares.after = share_of(run.m, m);
  total.m = m;
  total.l = metal::fma(total.l, shares.before, run.l * shares.after);
  return shares;
}

METAL_FUNC Block merged(Shares shares, Block before, Block after) {
  return metal::fma(before, Block(shares.before, shares.before), after * shares.after);
}

// Of a row at its end. It is live where the sum is not 0 then.
METAL_FUNC RowSums finished_sums(bool sees_keys, RowSums sums) {
  AttnRow<float> row = finished_row(sees_keys, sums.m, sums.l);
  sums.m = row.m;
  sums.l = row.l;
  return sums;
}

// The row's sink comes last: one more logit. Returns what o is to be multiplied with.
METAL_FUNC float add_sink(float sink, thread RowSums& total) {
  RowSums one = {sink, 1.0f};
  return sink == -INFINITY ? 1.0f : merge(total, one).before;
}

}  // namespace forge
