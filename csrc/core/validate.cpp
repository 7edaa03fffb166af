#include "core/validate.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <sstream>
#include <stdexcept>
#include <string>

#include "core/errors.h"

namespace forge {
namespace {

std::string shape_text(const Int64* shape, int ndim) {
  std::string text = "(";
  for (int axis = 0; axis < ndim; ++axis) {
    text += (axis == 0 ? "" : ", ") + std::to_string(shape[axis]);
  }
  return text + (ndim == 1 ? ",)" : ")");
}

// The parts of the message are put together only where it is needed.
template <typename... Parts>
void require(bool ok, const Parts&... parts) {
  if (ok) return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

std::array<Int64, 4> expected_shape(Axes axes, const Problem& problem) {
  switch (axes) {
    case Axes::kQueryHeads:
      return {problem.B, problem.Tq, problem.H, problem.hd};
    case Axes::kKeyHeads:
      return {problem.B, problem.Tk, problem.Hkv, problem.hd};
    case Axes::kOutputHeads:
      return {problem.B, problem.Tq, problem.H, problem.hv};
    case Axes::kValueHeads:
      return {problem.B, problem.Tk, problem.Hkv, problem.hv};
    case Axes::kRows:
    case Axes::kSomeRows:
      return {problem.B, problem.H, problem.Tq, 0};
    case Axes::kPairs:
    case Axes::kSomePairs:
      break;
  }
  return {problem.B, problem.H, problem.Tq, problem.Tk};
}

void check_shape(const char* name, const Operand& operand, const std::array<Int64, 4>& expected,
                 int ndim) {
  const bool same = operand.ndim == ndim &&
                    std::equal(expected.begin(), expected.begin() + ndim, operand.shape.begin());
  if (same) return;
  throw std::invalid_argument(name + std::string(" must have shape ") +
                              shape_text(expected.data(), ndim) + ", got " +
                              shape_text(operand.shape.data(), operand.ndim));
}

// Each axis 1 or the expected one.
void check_broadcast_shape(const char* name, const Operand& operand,
                           const std::array<Int64, 4>& expected, int ndim) {
  bool fits = operand.ndim == ndim;
  for (std::size_t axis = 0; fits && axis < static_cast<std::size_t>(ndim); ++axis) {
    fits = operand.shape[axis] == expected[axis] || operand.shape[axis] == 1;
  }
  if (fits) return;
  throw std::invalid_argument(name + std::string(" must have shape ") +
                              shape_text(expected.data(), ndim) + " or 1 on some axes, got " +
                              shape_text(operand.shape.data(), operand.ndim));
}

void check_unit_last_axis(const char* name, const Operand& operand) {
  require(operand.shape[3] < 2 || operand.strides[3] == 1, name,
          " must have a last axis of unit stride, got ", operand.strides[3], " elements");
}

void check_contiguous(const char* name, const Operand& operand) {
  Int64 expected = 1;
  for (auto axis = static_cast<std::size_t>(operand.ndim); axis-- > 0;) {
    require(operand.shape[axis] < 2 || operand.strides[axis] == expected, name,
            " must be C-contiguous");
    expected *= operand.shape[axis];
  }
}

// Throws TypeError.
void check_dtype(const OperandInfo& info, Use use, const Problem& problem) {
  const DType got = problem.operands[info.slot].dtype, sums = sum_dtype(problem.dtype);
  DType expected = info.stored == Stored::kAsK ? problem.kv_dtype : problem.dtype;
  const bool kept = info.stored == Stored::kOutput && !is_written(use);
  if (info.stored == Stored::kSums || kept) expected = sums;
  if (info.stored == Stored::kBool) expected = DType::kBool;
  const bool or_sums = info.stored == Stored::kAsQOrSums || is_written(use);
  if (got == expected || (or_sums && got == sums)) return;
  throw TypeError(std::string(info.name) + " must be " + dtype_name(expected) + ", got " +
                  dtype_name(got));
}

void check_output(const char* name, const Operand& operand) {
  require(operand.writeable, name, " must be writeable, got a read-only array");
  if (is_empty(operand)) return;
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(operand.ndim); ++axis) {
    require(operand.shape[axis] < 2 || operand.strides[axis] != 0, name,
            " must have no zero stride, got one on axis ", axis);
  }
}

void check_sizes(const Problem& problem) {
  require(problem.B >= 0 && problem.Tq >= 0 && problem.Tk >= 0, "lengths must not be negative");
  require(problem.H >= 1, "num_heads must be at least 1, got ", problem.H);
  require(problem.Hkv >= 1, "num_kv_heads must be at least 1, got ", problem.Hkv);
  require(problem.hd >= 1, "head dim must be at least 1, got ", problem.hd);
  require(problem.hv >= 1, "the head dim of v must be at least 1, got ", problem.hv);
  require(problem.H % problem.Hkv == 0, "num_heads must be a multiple of num_kv_heads, got ",
          problem.H, " and ", problem.Hkv);
}

void check_real(const char* name, double value, DType dtype) {
  require(std::isfinite(value), name, " must be finite, got ", value);
  if (dtype != DType::kFloat64 && value != 0) {
    const double size = std::fabs(value);
    require(size <= std::numeric_limits<float>::max() && static_cast<float>(size) > 0, name,
            " must be within float32's range");
  }
}

}  // namespace

void check_problem(const Problem& problem) {
  check_sizes(problem);
  const bool half_cache = problem.dtype == DType::kFloat32 && is_half(problem.kv_dtype);
  if (problem.kv_dtype != problem.dtype && !half_cache) {
    throw TypeError(std::string("k must be ") + dtype_name(problem.dtype) + " as q is, got " +
                    dtype_name(problem.kv_dtype));
  }
  require(problem.window_left >= -1, "window left must be at least -1, got ", problem.window_left);
  require(problem.window_right >= -1, "window right must be at least -1, got ",
          problem.window_right);
  check_real("scale", problem.scale, problem.dtype);
  check_real("softcap", problem.softcap, problem.dtype);
  require(problem.softcap >= 0, "softcap must not be negative, got ", problem.softcap);
  const Int64 records = problem.runs ? problem.B * problem.Tq : problem.B;
  require(static_cast<std::int64_t>(problem.ranges.size()) == records,
          "ranges must hold one record a sequence, or one a query");
  for (const AttnRange& range : problem.ranges) {
    require(range.key_start >= 0 && range.key_start <= problem.Tk, "key_start must be within [0, ",
            problem.Tk, "], got ", range.key_start);
    require(range.key_end >= 0 && range.key_end <= problem.Tk, "key_end must be within [0, ",
            problem.Tk, "], got ", range.key_end);
  }
}

void check_operand(const OperandInfo& info, const Problem& problem) {
  const Operand& operand = problem.operands[info.slot];
  const char* name = info.name;
  check_dtype(info, use_of(info, problem), problem);
  const bool rows = info.axes == Axes::kRows || info.axes == Axes::kSomeRows;
  const bool some = info.axes == Axes::kSomeRows || info.axes == Axes::kSomePairs;
  const std::array<Int64, 4> expected = expected_shape(info.axes, problem);
  if (some) {
    check_broadcast_shape(name, operand, expected, rows ? 3 : 4);
  } else {
    check_shape(name, operand, expected, rows ? 3 : 4);
  }
  if (!is_empty(operand) && !some) {  // NumPy gives empty arrays any strides
    if (rows || info.axes == Axes::kPairs) {
      check_contiguous(name, operand);
    } else {
      check_unit_last_axis(name, operand);
    }
  }
  const Use use = use_of(info, problem);
  if (!is_written(use)) return;
  if (info.axes == Axes::kSomePairs && !is_empty(operand)) check_unit_last_axis(name, operand);
  check_output(name, operand);
  if (info.slot != kBufferRounded) return;
  const DType kept = problem.operands[kBufferO].dtype;
  require(is_half(operand.dtype) && !is_half(kept), name,
          " must be of half precision beside a "
          "float32 o, got ",
          dtype_name(operand.dtype), " beside ", dtype_name(kept));
}

}  // namespace forge
