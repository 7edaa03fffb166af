// The checks every entry point makes again, whatever the caller has checked: sizes, strides and
// ranges. After these, no kernel can read or write outside the arrays.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/problem.h"

namespace forge {

// An array as the caller handed it over. Strides are in elements; those of axes shorter than 2 are
// 0.
struct ArrayView {
  std::string name;
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  bool writeable = false;
  MemoryBlock owner{};  // all memory of the array that this one is a view of
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
};

// Whether an axis has no extent.
bool is_empty(const ArrayView& array);

// Throws std::invalid_argument that names the option, what it is and what it may be.
void check_problem(const Problem& problem);

// Strides of a [B, T, heads, hd] array of the problem's dtype with a unit last axis. Throws
// TypeError for another dtype, std::invalid_argument for another shape or stride.
AttnStrides check_heads_array(const ArrayView& array, const std::array<std::int64_t, 4>& shape,
                              DType dtype);

// The array must be C-contiguous and of that shape and dtype.
void check_contiguous_array(const ArrayView& array, const std::vector<std::int64_t>& shape,
                            DType dtype);

// Outputs: writeable, and no two elements on one address along an axis.
void check_output(const ArrayView& array);

}  // namespace forge
