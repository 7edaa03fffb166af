// The arrays of a call: one row of one table each. What an array is called, where a shader finds
// it, which shape it has and which calls read or write it stands here and nowhere else.
#pragma once

#include <array>
#include <cstddef>

#include "shared/attn_params.h"
#include "shared/buffer_indices.h"

namespace forge {

enum class DType { kFloat32, kFloat64 };

inline const char* dtype_name(DType dtype) {
  return dtype == DType::kFloat32 ? "float32" : "float64";
}
inline Int64 dtype_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 8; }

// What a call computes: a whole forward or backward, or one of the backward's materialized kernels.
enum class Pass { kForward, kBackward, kBwdD, kBwdDq, kBwdDkv };
constexpr int kPasses = 5;

// The bytes [begin, end).
struct MemoryBlock {
  const char* begin;
  const char* end;
};

// An array where it lies. Strides are in elements; those of axes shorter than 2 are 0.
struct Operand {
  void* data = nullptr;  // null: not given
  DType dtype = DType::kFloat32;
  int ndim = 0;
  std::array<Int64, 4> shape{};
  std::array<Int64, 4> strides{};
  bool writeable = false;
  MemoryBlock owner{};  // all memory of the array that this one is a view of

  // Of a [B, T, heads, hd] array.
  AttnStrides heads_strides() const { return {strides[0], strides[1], strides[2], 0}; }
};

// Whether an axis has no extent.
inline bool is_empty(const Operand& operand) {
  for (int axis = 0; axis < operand.ndim; ++axis) {
    if (operand.shape[static_cast<std::size_t>(axis)] == 0) return true;
  }
  return false;
}

enum class Axes {
  kQueryHeads,  // [B, Tq, H, hd], any strides but that of the last axis
  kKeyHeads,    // [B, Tk, Hkv, hd], likewise
  kRows,        // [B, H, Tq], C-contiguous
  kPairs,       // [B, H, Tq, Tk], C-contiguous
};

enum class Use {
  kNone,
  kRead,
  kReadByFused,
  kReadIfGiven,
  kWrite,
  kAddTo,  // overwritten instead where the call does not accumulate
};

struct OperandInfo {
  BufferIndex slot;
  const char* name;
  Axes axes;
  bool materialized_only;
  std::array<Use, kPasses> uses;  // by Pass
};

namespace operand_uses {
constexpr Use none = Use::kNone, read = Use::kRead, by_fused = Use::kReadByFused,
              if_given = Use::kReadIfGiven, write = Use::kWrite, add_to = Use::kAddTo;
}  // namespace operand_uses

constexpr std::size_t kOperands = kBufferRanges;  // their slots come first

inline const std::array<OperandInfo, kOperands>& operand_table() {
  using namespace operand_uses;
  static constexpr std::array<OperandInfo, kOperands> table = {{
      //                                                 forward   backward  bwd_d     bwd_dq
      //                                                 bwd_dkv
      {kBufferQ, "q", Axes::kQueryHeads, false, {{read, read, none, read, read}}},
      {kBufferK, "k", Axes::kKeyHeads, false, {{read, read, none, read, read}}},
      {kBufferV, "v", Axes::kKeyHeads, false, {{read, read, none, read, read}}},
      {kBufferO, "o", Axes::kQueryHeads, false, {{write, read, read, none, none}}},
      {kBufferP, "p", Axes::kPairs, true, {{write, read, none, read, read}}},
      {kBufferRowMax, "row_max", Axes::kRows, false, {{write, by_fused, none, none, none}}},
      {kBufferRowSum, "row_sum", Axes::kRows, false, {{write, by_fused, none, none, none}}},
      {kBufferDout, "dout", Axes::kQueryHeads, false, {{none, read, read, read, read}}},
      {kBufferDlse, "dlse", Axes::kRows, false, {{none, if_given, if_given, none, none}}},
      {kBufferDRow, "d_row", Axes::kRows, false, {{none, none, write, read, read}}},
      {kBufferDq, "dq", Axes::kQueryHeads, false, {{none, add_to, none, add_to, none}}},
      {kBufferDk, "dk", Axes::kKeyHeads, false, {{none, add_to, none, none, add_to}}},
      {kBufferDv, "dv", Axes::kKeyHeads, false, {{none, add_to, none, none, add_to}}},
  }};
  return table;
}

// The operands of one call, by the names of their slots.
class Operands {
 public:
  Operand& operator[](BufferIndex slot) { return at_[static_cast<std::size_t>(slot)]; }
  const Operand& operator[](BufferIndex slot) const { return at_[static_cast<std::size_t>(slot)]; }

 private:
  std::array<Operand, kOperands> at_;
};

// Rows of a [B, T, heads, hd] array. The element type is what the caller has made sure of.
template <typename Element>
struct HeadRows {
  Element* data;
  AttnStrides strides;

  FORGE_MEMBER explicit HeadRows(const Operand& operand)
      : data(static_cast<Element*>(operand.data)), strides(operand.heads_strides()) {}
  FORGE_MEMBER Element* at(Int64 b, Int64 t, Int64 head) const {
    return data + element_offset(strides, b, t, head);
  }
};

// The elements of a C-contiguous array; null where it is not given.
template <typename Element>
Element* elements(const Operand& operand) {
  return static_cast<Element*>(operand.data);
}

}  // namespace forge
