// The results of the backward on their way into the arrays.
#pragma once

#include <limits>

#include "cpu/backward/pack.h"
#include "cpu/simd_math.h"

namespace forge::cpu::FORGE_TARGET {
namespace {

template <typename Stored>
FORGE_INLINE void store_dq_as(const BackwardProblem& problem, const BackwardBlock& block,
                              const Real* partial, Int64 count, Stored* dq) {
  const AttnParams& params = problem.params;
  const BackwardTiling& tiling = block.tiling;
  const Vec scale = broadcast(params.scale);
  RowCursor place = row_cursor(params, block.kv_head, block.row_begin);
  for (Int64 r = 0; r < block.rows; ++r, place.next()) {
    Stored* to = dq + element_offset(params.dq, block.b, place.query, place.head);
    const bool live = is_live(block, r);
    if (!live && problem.accumulate) continue;
    for (Int64 at = 0; at < tiling.channels; at += kLanes) {
      Vec sum{};
      for (Int64 n = 0; live && n < count; ++n) {
        sum = sum + load(partial + (n * block.rows + r) * tiling.channels + at);
      }
      sum = sum * scale;
      if (problem.accumulate) sum = load_within(to, at, tiling.hd) + sum;
      store_within(to, at, tiling.hd, sum);
    }
  }
}

void store_dq(const BackwardProblem& problem, const BackwardBlock& block, const Real* partial,
              Int64 count) {
  with_elements(problem.arrays.dq,
                [&](auto* dq) { store_dq_as(problem, block, partial, count, dq); });
}

void store_key(const Operand& gradient, const Real* sums, Int64 b, Int64 t, bool accumulate) {
  const auto& [B, T, heads, hd] = gradient.shape;
  const Real* from = sums + (b * T + t) * heads * hd;
  const AttnStrides strides = gradient.heads_strides();
  with_elements(gradient, [&, &heads = heads, &hd = hd](auto* first) {
    for (Int64 head = 0; head < heads; ++head, from += hd) {
      auto* to = first + element_offset(strides, b, t, head);
      for (Int64 at = 0; at < hd; at += kLanes) {
        Vec sum = load_within(from, at, hd);
        if (accumulate) sum = load_within(to, at, hd) + sum;
        store_within(to, at, hd, sum);
      }
    }
  });
}

template <typename Stored>
FORGE_INLINE void sink_terms_of(const BackwardProblem& problem, const Stored* dout, Int64 b,
                                Int64 h, Real* terms) {
  const AttnParams& params = problem.params;
  const BackwardArrays& arrays = problem.arrays;
  for (Int64 first = 0; first < params.Tq; first += kLanes) {
    const Stored* dout_rows[kLanes] = {};
    const Real* o_rows[kLanes] = {};
    Vec t{}, inverse{}, dlse{};
    for (int j = 0; j < kLanes && first + j < params.Tq; ++j) {
      const Int64 i = first + j, row = row_index(params, b, h, i);
      const Real sink = sink_of(arrays.sinks, b, h, i);
      if (sink == -std::numeric_limits<Real>::infinity()) continue;  // none, in rows of NaN too
      t[j] = sink - arrays.row_max[row];
      inverse[j] = 1 / arrays.row_sum[row];
      if (arrays.dlse) dlse[j] = arrays.dlse[row];
      if (is_sink_alone(problem, b, h, i)) continue;
      dout_rows[j] = dout + element_offset(params.dout, b, i, h);
      o_rows[j] = arrays.o + element_offset(params.o, b, i, h);
    }
    t = select(t > Vec{}, Vec{}, t);
    const Vec d = dot_pairs<false>(dout_rows, o_rows, params.hv) - dlse;
    const Vec p = exp_of_nonpositive(t) * inverse;
    store_within(terms, first, params.Tq, select(inverse == Vec{}, Vec{}, -(p * d)));
  }
}

void sink_terms(const BackwardProblem& problem, Int64 b, Int64 h, Real* terms) {
  with_elements(problem.arrays.dout,
                [&](const auto* dout) { sink_terms_of(problem, dout, b, h, terms); });
}

void store_elements(const StridedElements& to, const Real* from, Int64 count, bool accumulate) {
  Operand typed;
  typed.data = to.data;
  typed.dtype = to.dtype;
  with_elements(typed, [&](auto* first) {
    const int step = to.stride == 1 ? kLanes : 1;
    for (Int64 n = 0; n < count; n += step) {
      auto* at = first + n * to.stride;
      const int lanes = static_cast<int>(smaller(step, count - n));
      Vec x = load_partial(from + n, lanes);
      if (accumulate) x = load_partial(at, lanes) + x;
      store_partial(at, x, lanes);
    }
  });
}

}  // namespace
}  // namespace forge::cpu::FORGE_TARGET
