// Zeros in the arrays that a call writes.
#pragma once

#include <cstring>

#include "core/problem.h"

namespace forge {

// A [B, T, heads, hd] array; zero is no bits in every element type.
inline void fill_zero(const Operand& operand) {
  const AttnStrides strides = operand.heads_strides();
  const auto& [B, T, heads, hd] = operand.shape;
  const Int64 bytes = dtype_bytes(operand.dtype);
  for (Int64 b = 0; b < B; ++b) {
    for (Int64 t = 0; t < T; ++t) {
      for (Int64 h = 0; h < heads; ++h) {
        std::memset(static_cast<char*>(operand.data) + element_offset(strides, b, t, h) * bytes, 0,
                    static_cast<std::size_t>(hd * bytes));
      }
    }
  }
}

inline void zero_gradients(const Problem& problem) {
  for (const BufferIndex slot : {kBufferDq, kBufferDk, kBufferDv}) {
    fill_zero(problem.operands[slot]);
  }
}

}  // namespace forge
