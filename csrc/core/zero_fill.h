// Zeros in the arrays that a call writes.
#pragma once

#include <algorithm>

#include "core/problem.h"

namespace forge {

// A [B, T, heads, hd] array of that element type.
template <typename Element>
void fill_zero(const Operand& operand) {
  const HeadRows<Element> rows(operand);
  const auto& [B, T, heads, hd] = operand.shape;
  for (Int64 b = 0; b < B; ++b) {
    for (Int64 t = 0; t < T; ++t) {
      for (Int64 h = 0; h < heads; ++h) std::fill_n(rows.at(b, t, h), hd, Element(0));
    }
  }
}

template <typename Element>
void zero_gradients(const Problem& problem) {
  for (const BufferIndex slot : {kBufferDq, kBufferDk, kBufferDv}) {
    fill_zero<Element>(problem.operands[slot]);
  }
}

}  // namespace forge
