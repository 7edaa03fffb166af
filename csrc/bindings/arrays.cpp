#include "bindings/arrays.h"

#include <cstring>
#include <stdexcept>

#include "core/errors.h"

namespace py = pybind11;

namespace forge::bindings {
namespace {

py::array array_of(const py::handle& object, const std::string& name) {
  if (!py::isinstance<py::array>(object)) {
    throw TypeError(name + " must be a NumPy array, got " +
                    std::string(py::str(py::type::handle_of(object).attr("__name__"))));
  }
  return py::reinterpret_borrow<py::array>(object);
}

// The bytes of the array at the end of the chain of views.
MemoryBlock owner_of(py::array array) {
  while (py::isinstance<py::array>(array.base())) {
    array = py::reinterpret_borrow<py::array>(array.base());
  }
  const char* lowest = static_cast<const char*>(array.data());
  const char* end = lowest + array.itemsize();
  for (py::ssize_t axis = 0; axis < array.ndim(); ++axis) {
    if (array.shape(axis) == 0) return {lowest, lowest};
    const py::ssize_t reach = (array.shape(axis) - 1) * array.strides(axis);
    (reach < 0 ? lowest : end) += reach;
  }
  return {lowest, end};
}

}  // namespace

Operand operand_of(const py::handle& object, const std::string& name) {
  const py::array array = array_of(object, name);
  const py::dtype dtype = array.dtype();
  Operand operand;
  if (dtype.kind() == 'f' && dtype.itemsize() == 4) {
    operand.dtype = DType::kFloat32;
  } else if (dtype.kind() == 'f' && dtype.itemsize() == 8) {
    operand.dtype = DType::kFloat64;
  } else if (dtype.kind() == 'f' && dtype.itemsize() == 2) {
    operand.dtype = DType::kFloat16;
  } else if (dtype.kind() == 'u' && dtype.itemsize() == 2) {
    operand.dtype = DType::kBFloat16;
  } else if (dtype.kind() == 'b') {
    operand.dtype = DType::kBool;
  } else {
    throw TypeError(name +
                    " must be float32, float64, float16, uint16 (the bits of bfloat16) or bool, "
                    "got " +
                    std::string(py::str(dtype)));
  }
  const bool native = dtype.attr("isnative").cast<bool>();  // '<' where that is the machine's own
  const bool aligned = (array.flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_) != 0;
  if (!native || !aligned) {
    throw std::invalid_argument(name + " must be aligned and of native byte order, got " +
                                (native ? "a misaligned array" : "a byte-swapped one"));
  }
  if (array.ndim() > 4) {
    throw std::invalid_argument(name + " must have at most 4 axes, got " +
                                std::to_string(array.ndim()));
  }
  operand.data = const_cast<void*>(array.data());
  operand.writeable = array.writeable();
  if (operand.writeable) operand.owner = owner_of(array);
  operand.ndim = static_cast<int>(array.ndim());
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(operand.ndim); ++axis) {
    const auto at = static_cast<py::ssize_t>(axis);
    operand.shape[axis] = array.shape(at);
    // Strides of axes shorter than 2 are arbitrary in NumPy and never used.
    operand.strides[axis] = array.shape(at) < 2 ? 0 : array.strides(at) / dtype.itemsize();
  }
  return operand;
}

std::vector<AttnRange> ranges_of(const py::handle& object) {
  const py::array array = array_of(object, "ranges");
  const bool fits = array.ndim() == 2 || array.ndim() == 3;
  if (!py::isinstance<py::array_t<std::int64_t, py::array::c_style>>(array) || !fits ||
      array.shape(array.ndim() - 1) != 3) {
    throw std::invalid_argument(
        "ranges must be a C-contiguous int64 array of shape [B, 3] or [B, Tq, 3]");
  }
  std::vector<AttnRange> ranges(static_cast<std::size_t>(array.size() / 3));
  static_assert(sizeof(AttnRange) == 3 * sizeof(std::int64_t), "a record a row");
  if (!ranges.empty()) {
    std::memcpy(ranges.data(), array.data(), ranges.size() * sizeof(AttnRange));
  }
  return ranges;
}

py::array ranges_array(const std::vector<AttnRange>& ranges) {
  py::array_t<std::int64_t> array({static_cast<py::ssize_t>(ranges.size()), py::ssize_t{3}});
  std::memcpy(array.mutable_data(), ranges.data(), ranges.size() * sizeof(AttnRange));
  return array;
}

}  // namespace forge::bindings
