// The arrays of a call: one row of one table each. What an array is called, where a shader finds
// it, which shape it has and which calls read or write it stands here and nowhere else.
#pragma once

#include <array>
#include <cstddef>

#include "shared/attn_params.h"
#include "shared/buffer_indices.h"

namespace forge {

enum class DType { kFloat32, kFloat64, kFloat16, kBFloat16, kBool };

inline const char* dtype_name(DType dtype) {
  constexpr const char* kNames[] = {"float32", "float64", "float16", "bfloat16", "bool"};
  return kNames[static_cast<int>(dtype)];
}
inline Int64 dtype_bytes(DType dtype) {
  constexpr Int64 kBytes[] = {4, 8, 2, 2, 1};
  return kBytes[static_cast<int>(dtype)];
}
inline bool is_half(DType dtype) { return dtype_bytes(dtype) == 2; }

// What sums and row statistics are kept in where arrays are of `dtype`.
inline DType sum_dtype(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

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
  // Of a [B, H, Tq, Tk] or [B, H, Tq] array, or one with axes of 1.
  AttnPairStrides pair_strides() const {
    return {strides[0], strides[1], strides[2], strides[3], 0};
  }
};

// Whether an axis has no extent.
inline bool is_empty(const Operand& operand) {
  for (int axis = 0; axis < operand.ndim; ++axis) {
    if (operand.shape[static_cast<std::size_t>(axis)] == 0) return true;
  }
  return false;
}

enum class Axes {
  kQueryHeads,   // [B, Tq, H, hd], any strides but that of the last axis
  kOutputHeads,  // [B, Tq, H, hv], likewise
  kKeyHeads,     // [B, Tk, Hkv, hd], likewise
  kValueHeads,   // [B, Tk, Hkv, hv], likewise
  kRows,         // [B, H, Tq], C-contiguous
  kPairs,        // [B, H, Tq, Tk], C-contiguous
  kSomeRows,     // each axis 1 or that of [B, H, Tq]; any strides, 0 along an axis of 1
  kSomePairs,    // each axis 1 or that of [B, H, Tq, Tk], likewise
};

// Whether its elements are rows of heads.
inline bool has_heads(Axes axes) {
  return axes == Axes::kQueryHeads || axes == Axes::kOutputHeads || axes == Axes::kKeyHeads ||
         axes == Axes::kValueHeads;
}

enum class Use {
  kNone,
  kRead,
  kReadByFused,  // the materialized family reads it if it is given
  kReadIfGiven,
  kWrite,
  kWriteIfGiven,
  kAddTo,  // overwritten instead where the call does not accumulate
  kAddToIfGiven,
};

// Element types follow those of q and k. What is written may have the sums' type instead.
enum class Stored {
  kAsQ,
  kAsK,
  kOutput,  // as q where it is written; the sums' where it is read
  kSums,
  kAsQOrSums,
  kBool,
};

struct OperandInfo {
  BufferIndex slot;
  const char* name;
  Axes axes;
  Stored stored;
  bool materialized_only;
  std::array<Use, kPasses> uses;  // by Pass
};

namespace operand_table_words {
constexpr Use none = Use::kNone, read = Use::kRead, by_fused = Use::kReadByFused,
              if_given = Use::kReadIfGiven, write = Use::kWrite,
              write_if_given = Use::kWriteIfGiven, add_to = Use::kAddTo,
              add_if_given = Use::kAddToIfGiven;
constexpr Stored as_q = Stored::kAsQ, as_k = Stored::kAsK, output = Stored::kOutput,
                 sums = Stored::kSums, as_q_or_sums = Stored::kAsQOrSums, boolean = Stored::kBool;
}  // namespace operand_table_words

inline bool is_written(Use use) {
  return use == Use::kWrite || use == Use::kWriteIfGiven || use == Use::kAddTo ||
         use == Use::kAddToIfGiven;
}
inline bool is_optional(Use use) {
  return use == Use::kReadIfGiven || use == Use::kWriteIfGiven || use == Use::kAddToIfGiven;
}

constexpr std::size_t kOperands = kBufferRanges;  // their slots come first

inline const std::array<OperandInfo, kOperands>& operand_table() {
  using namespace operand_table_words;
  static constexpr std::array<OperandInfo, kOperands> table = {{
      //                                                 forward   backward  bwd_d     bwd_dq
      //                                                 bwd_dkv
      {kBufferQ, "q", Axes::kQueryHeads, as_q, false, {{read, read, none, read, read}}},
      {kBufferK, "k", Axes::kKeyHeads, as_k, false, {{read, read, none, read, read}}},
      {kBufferV, "v", Axes::kValueHeads, as_k, false, {{read, read, none, read, read}}},
      {kBufferO, "o", Axes::kOutputHeads, output, false, {{write, read, read, none, none}}},
      {kBufferP, "p", Axes::kPairs, sums, true, {{write, read, none, read, read}}},
      {kBufferRowMax, "row_max", Axes::kRows, sums, false, {{write, by_fused, none, none, none}}},
      {kBufferRowSum, "row_sum", Axes::kRows, sums, false, {{write, by_fused, none, none, none}}},
      {kBufferDout, "dout", Axes::kOutputHeads, as_q, false, {{none, read, read, read, read}}},
      {kBufferDlse, "dlse", Axes::kRows, sums, false, {{none, if_given, if_given, none, none}}},
      {kBufferDRow, "d_row", Axes::kRows, sums, false, {{none, none, write, read, read}}},
      {kBufferDq, "dq", Axes::kQueryHeads, as_q, false, {{none, add_to, none, add_to, none}}},
      {kBufferDk, "dk", Axes::kKeyHeads, as_k, false, {{none, add_to, none, none, add_to}}},
      {kBufferDv, "dv", Axes::kValueHeads, as_k, false, {{none, add_to, none, none, add_to}}},
      {kBufferRounded,
       "rounded",
       Axes::kOutputHeads,
       as_q,
       false,
       {{write_if_given, none, none, none, none}}},
      {kBufferBias,
       "bias",
       Axes::kSomePairs,
       as_q_or_sums,
       false,
       {{if_given, if_given, none, if_given, if_given}}},
      {kBufferMask,
       "mask",
       Axes::kSomePairs,
       boolean,
       false,
       {{if_given, if_given, none, if_given, if_given}}},
      {kBufferSinks,
       "sinks",
       Axes::kSomeRows,
       as_q_or_sums,
       false,
       {{if_given, if_given, none, none, none}}},
      {kBufferDbias,
       "dbias",
       Axes::kSomePairs,
       as_q_or_sums,
       false,
       {{none, add_if_given, none, none, none}}},
      {kBufferDsinks,
       "dsinks",
       Axes::kSomeRows,
       as_q_or_sums,
       false,
       {{none, add_if_given, none, none, none}}},
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
