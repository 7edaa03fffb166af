#include "core/validate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "core/errors.h"

namespace forge {
namespace {

const char* dtype_name(DType dtype) { return dtype == DType::kFloat32 ? "float32" : "float64"; }

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "(";
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    text += (axis == 0 ? "" : ", ") + std::to_string(shape[axis]);
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

void require(bool ok, const std::string& message) {
  if (!ok) throw std::invalid_argument(message);
}

void check_shape(const ArrayView& array, const std::vector<std::int64_t>& shape, DType dtype) {
  if (array.dtype != dtype) {
    throw TypeError(array.name + " must be " + dtype_name(dtype) + ", got " +
                    dtype_name(array.dtype));
  }
  require(array.shape == shape, array.name + " must have shape " + shape_text(shape) + ", got " +
                                    shape_text(array.shape));
}

void check_sizes(const AttnParamsOf<double>& params) {
  require(params.B >= 0 && params.Tq >= 0 && params.Tk >= 0, "lengths must not be negative");
  require(params.H >= 1, "num_heads must be at least 1, got " + std::to_string(params.H));
  require(params.Hkv >= 1, "num_kv_heads must be at least 1, got " + std::to_string(params.Hkv));
  require(params.hd >= 1, "head dim must be at least 1, got " + std::to_string(params.hd));
  require(params.H % params.Hkv == 0, "num_heads must be a multiple of num_kv_heads, got " +
                                          std::to_string(params.H) + " and " +
                                          std::to_string(params.Hkv));
}

void check_real(const char* name, double value, DType dtype) {
  require(std::isfinite(value),
          std::string(name) + " must be finite, got " + std::to_string(value));
  if (dtype == DType::kFloat32 && value != 0) {
    const double size = std::fabs(value);
    require(size <= std::numeric_limits<float>::max() && static_cast<float>(size) > 0,
            std::string(name) + " must be within float32's range");
  }
}

}  // namespace

bool is_empty(const ArrayView& array) {
  return std::find(array.shape.begin(), array.shape.end(), 0) != array.shape.end();
}

void check_problem(const Problem& problem) {
  const AttnParamsOf<double>& params = problem.params;
  check_sizes(params);
  require(params.window_left >= -1,
          "window left must be at least -1, got " + std::to_string(params.window_left));
  require(params.window_right >= -1,
          "window right must be at least -1, got " + std::to_string(params.window_right));
  check_real("scale", params.scale, problem.dtype);
  check_real("softcap", params.softcap, problem.dtype);
  require(params.softcap >= 0,
          "softcap must not be negative, got " + std::to_string(params.softcap));
  require(static_cast<std::int64_t>(problem.ranges.size()) == params.B,
          "ranges must hold one record a sequence");
  for (const AttnRange& range : problem.ranges) {
    require(range.key_start >= 0 && range.key_start <= params.Tk,
            "key_start must be within [0, " + std::to_string(params.Tk) + "], got " +
                std::to_string(range.key_start));
    require(range.key_end >= 0 && range.key_end <= params.Tk,
            "key_end must be within [0, " + std::to_string(params.Tk) + "], got " +
                std::to_string(range.key_end));
  }
}

AttnStrides check_heads_array(const ArrayView& array, const std::array<std::int64_t, 4>& shape,
                              DType dtype) {
  check_shape(array, {shape.begin(), shape.end()}, dtype);
  if (is_empty(array)) return {0, 0, 0, 0};  // NumPy gives such arrays any strides
  require(array.shape[3] < 2 || array.strides[3] == 1,
          array.name + " must have a last axis of unit stride, got " +
              std::to_string(array.strides[3]) + " elements");
  return {array.strides[0], array.strides[1], array.strides[2], 0};
}

void check_contiguous_array(const ArrayView& array, const std::vector<std::int64_t>& shape,
                            DType dtype) {
  check_shape(array, shape, dtype);
  if (is_empty(array)) return;
  std::int64_t expected = 1;
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    require(shape[axis] < 2 || array.strides[axis] == expected,
            array.name + " must be C-contiguous");
    expected *= shape[axis];
  }
}

void check_output(const ArrayView& array) {
  require(array.writeable, array.name + " must be writeable, got a read-only array");
  if (is_empty(array)) return;
  for (std::size_t axis = 0; axis < array.shape.size(); ++axis) {
    require(array.shape[axis] < 2 || array.strides[axis] != 0,
            array.name + " must have no zero stride, got one on axis " + std::to_string(axis));
  }
}

}  // namespace forge
