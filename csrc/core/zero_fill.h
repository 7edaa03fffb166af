// Zeros in the arrays that a call writes.
#pragma once

#include <algorithm>

#include "core/problem.h"

namespace forge {

// A strided [B, T, heads, hd] array.
template <typename Real>
void fill_zero(Real* data, const AttnStrides& strides, const AttnParamsOf<double>& params, Int64 T,
               Int64 heads) {
  for (Int64 b = 0; b < params.B; ++b) {
    for (Int64 t = 0; t < T; ++t) {
      for (Int64 h = 0; h < heads; ++h) {
        std::fill_n(data + element_offset(strides, b, t, h), params.hd, Real(0));
      }
    }
  }
}

template <typename Real>
void zero_gradients(const Problem& problem, const BackwardArrays<Real>& arrays) {
  const AttnParamsOf<double>& params = problem.params;
  fill_zero(arrays.dq, params.dq, params, params.Tq, params.H);
  fill_zero(arrays.dk, params.dk, params, params.Tk, params.Hkv);
  fill_zero(arrays.dv, params.dv, params, params.Tk, params.Hkv);
}

}  // namespace forge
