// Operands for tests, of plain vectors.
#pragma once

#include <cstdlib>
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

inline const forge::OperandInfo& info_of(forge::BufferIndex slot) {
  for (const forge::OperandInfo& info : forge::operand_table()) {
    if (info.slot == slot) return info;
  }
  std::abort();
}

// The problem's operand of that slot: C-contiguous, of the shape that the table says.
inline void give(forge::Problem& problem, forge::BufferIndex slot,
                 const std::vector<float>& values) {
  const float* data = values.data();
  forge::Operand& operand = problem.operands[slot];
  switch (info_of(slot).axes) {
    case forge::Axes::kQueryHeads:
      operand = contiguous(data, {problem.B, problem.Tq, problem.H, problem.hd});
      break;
    case forge::Axes::kOutputHeads:
      operand = contiguous(data, {problem.B, problem.Tq, problem.H, problem.hv});
      break;
    case forge::Axes::kKeyHeads:
      operand = contiguous(data, {problem.B, problem.Tk, problem.Hkv, problem.hd});
      break;
    case forge::Axes::kValueHeads:
      operand = contiguous(data, {problem.B, problem.Tk, problem.Hkv, problem.hv});
      break;
    case forge::Axes::kRows:
    case forge::Axes::kSomeRows:
      operand = contiguous(data, {problem.B, problem.H, problem.Tq});
      break;
    case forge::Axes::kPairs:
    case forge::Axes::kSomePairs:
      operand = contiguous(data, {problem.B, problem.H, problem.Tq, problem.Tk});
      break;
  }
}

}  // namespace forge_test
