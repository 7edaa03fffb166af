// Zeros in the arrays that a call writes.
#pragma once

#include <cstring>

#include "core/problem.h"

namespace forge {

// An array of three axes, or of four whose last has unit stride; zero is no bits in every type.
inline void fill_zero(const Operand& operand) {
  const auto& [first, second, third, last] = operand.shape;
  const Int64 bytes = dtype_bytes(operand.dtype), run = (operand.ndim == 4 ? last : 1) * bytes;
  for (Int64 a = 0; a < first; ++a) {
    for (Int64 b = 0; b < second; ++b) {
      for (Int64 c = 0; c < third; ++c) {
        const Int64 at = a * operand.strides[0] + b * operand.strides[1] + c * operand.strides[2];
        std::memset(static_cast<char*>(operand.data) + at * bytes, 0,
                    static_cast<std::size_t>(run));
      }
    }
  }
}

inline void zero_gradients(const Problem& problem) {
  for (const BufferIndex slot : {kBufferDq, kBufferDk, kBufferDv, kBufferDbias, kBufferDsinks}) {
    if (problem.operands[slot].data != nullptr) fill_zero(problem.operands[slot]);
  }
}

}  // namespace forge
