#include "bindings/dlpack.h"

#include <pybind11/numpy.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace py = pybind11;

namespace forge::bindings {
namespace {

// The structs of DLPack 0.8, whose capsules every library can still export.
struct DlDevice {
  std::int32_t type;
  std::int32_t id;
};
struct DlDtype {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
struct DlTensor {
  void* data;
  DlDevice device;
  std::int32_t ndim;
  DlDtype dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: C-contiguous
  std::uint64_t byte_offset;
};
struct DlManagedTensor {
  DlTensor tensor;
  void* manager;
  void (*deleter)(DlManagedTensor*);
};

constexpr std::uint8_t kBFloat16Code = 4;

// Gives a capsule's tensor back when the array that reads it is gone.
py::capsule owner_of(DlManagedTensor* managed) {
  return py::capsule(managed, [](void* pointer) {
    auto* tensor = static_cast<DlManagedTensor*>(pointer);
    if (tensor->deleter != nullptr) tensor->deleter(tensor);
  });
}

// The bits of a bfloat16 tensor as a uint16 array, read-only, without a copy. Takes the capsule
// over, as DLPack has it.
py::array bfloat16_bits(const py::object& capsule) {
  if (!PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    throw std::invalid_argument("capsule must be a DLPack capsule that nobody has taken yet");
  }
  auto* managed = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
  const DlTensor& tensor = managed->tensor;
  if (tensor.dtype.code != kBFloat16Code || tensor.dtype.bits != 16 || tensor.dtype.lanes != 1) {
    throw std::invalid_argument("capsule must hold bfloat16, got DLPack type code " +
                                std::to_string(tensor.dtype.code) + " of " +
                                std::to_string(tensor.dtype.bits) + " bits");
  }
  constexpr std::int64_t kBytes = 2;
  std::vector<py::ssize_t> shape(tensor.shape, tensor.shape + tensor.ndim);
  std::vector<py::ssize_t> strides(shape.size());
  std::int64_t compact = kBytes;
  for (std::size_t axis = shape.size(); axis-- > 0;) {
    strides[axis] = tensor.strides ? tensor.strides[axis] * kBytes : compact;
    compact *= shape[axis];
  }
  PyCapsule_SetName(capsule.ptr(), "used_dltensor");
  const py::capsule owner = owner_of(managed);
  const auto* data = static_cast<const char*>(tensor.data) + tensor.byte_offset;
  py::array array(py::dtype::of<std::uint16_t>(), shape, strides, data, owner);
  array.attr("setflags")(py::arg("write") = false);
  return array;
}

}  // namespace

void register_dlpack(py::module_& module) {
  module.def("bfloat16_bits", &bfloat16_bits, py::arg("capsule"));
}

}  // namespace forge::bindings
