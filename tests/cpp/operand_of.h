// Operands for tests, of plain vectors.
#pragma once

#include <initializer_list>
#include <vector>

#include "core/problem.h"

namespace forge_test {

// C-contiguous float32.
inline forge::Operand contiguous(const float* data, std::initializer_list<std::int64_t> shape) {
  forge::Operand operand;
  operand.data = const_cast<float*>(data);
  operand.writeable = true;
  operand.ndim = static_cast<int>(shape.size());
  std::int64_t stride = 1;
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    operand.shape[axis] = shape.begin()[axis];
    operand.strides[axis] = stride;
    stride *= operand.shape[axis];
  }
  return operand;
}

// The problem's operand of that slot: C-contiguous, of the shape that the table says.
inline void give(forge::Problem& problem, forge::BufferIndex slot,
                 const std::vector<float>& values) {
  const float* data = values.data();
  forge::Operand& operand = problem.operands[slot];
  switch (forge::operand_table()[static_cast<std::size_t>(slot)].axes) {
    case forge::Axes::kQueryHeads:
      operand = contiguous(data, {problem.B, problem.Tq, problem.H, problem.hd});
      break;
    case forge::Axes::kKeyHeads:
      operand = contiguous(data, {problem.B, problem.Tk, problem.Hkv, problem.hd});
      break;
    case forge::Axes::kRows:
      operand = contiguous(data, {problem.B, problem.H, problem.Tq});
      break;
    case forge::Axes::kPairs:
      operand = contiguous(data, {problem.B, problem.H, problem.Tq, problem.Tk});
      break;
  }
}

}  // namespace forge_test
