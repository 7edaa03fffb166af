#include "bindings/plain_arrays.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <climits>

namespace py = pybind11;

namespace forge::bindings {
namespace {

PyObject* dtype_of_number(int number) {
  return py::detail::npy_api::get().PyArray_DescrFromType_(number);
}

PyObject* float32() {
  static PyObject* const dtype = dtype_of_number(py::detail::npy_api::NPY_FLOAT_);  // never let go
  return dtype;
}

PyObject* float16() {
  constexpr int kNumber = 23;  // NPY_HALF of NumPy's C API
  static PyObject* const dtype = dtype_of_number(kNumber);
  return dtype;
}

// Whether it is bfloat16, which packages add to NumPy: told by its name.
bool is_bfloat16(PyObject* dtype) {
  static std::atomic<PyObject*> known{nullptr};  // never let go
  if (dtype == known.load()) return true;
  constexpr int kFirstAdded = 256;  // NPY_USERDEF
  const auto* proxy = py::detail::array_descriptor_proxy(dtype);
  if (proxy->type_num < kFirstAdded || proxy->byteorder != '=') return false;
  PyObject* const name = PyObject_GetAttrString(dtype, "name");
  const bool found = name != nullptr && PyUnicode_Check(name) &&
                     PyUnicode_CompareWithASCIIString(name, "bfloat16") == 0;
  if (name == nullptr) PyErr_Clear();
  Py_XDECREF(name);
  PyObject* none = nullptr;
  if (found && known.compare_exchange_strong(none, dtype)) Py_INCREF(dtype);
  return found;
}

std::optional<DType> element_type(PyObject* dtype) {
  if (dtype == float32()) return DType::kFloat32;
  if (dtype == float16()) return DType::kFloat16;
  if (is_bfloat16(dtype)) return DType::kBFloat16;
  return std::nullopt;
}

struct PlainArray {
  const py::detail::PyArray_Proxy* proxy;
  DType dtype;
};

std::optional<PlainArray> plain_array(PyObject* object) {
  if (Py_TYPE(object) != py::detail::npy_api::get().PyArray_Type_) return std::nullopt;
  const auto* array = py::detail::array_proxy(object);
  const bool aligned = (array->flags & py::detail::npy_api::NPY_ARRAY_ALIGNED_) != 0;
  if (!aligned || array->nd < 1) return std::nullopt;
  const auto dtype = element_type(reinterpret_cast<PyObject*>(array->descr));
  if (!dtype) return std::nullopt;
  for (int axis = 0; axis < array->nd; ++axis) {
    if (array->dimensions[axis] < 1) return std::nullopt;
  }
  const int last = array->nd - 1;
  const bool unit = array->dimensions[last] == 1 || array->strides[last] == dtype_bytes(*dtype);
  if (!unit) return std::nullopt;
  return PlainArray{array, *dtype};
}

// Contiguous axes in front of the element at `data`.
template <std::size_t N>
Operand contiguous(void* data, DType dtype, const std::array<Int64, N>& shape) {
  Operand operand;
  operand.data = data;
  operand.dtype = dtype;
  operand.ndim = N;
  operand.writeable = true;
  Int64 stride = 1;
  for (std::size_t axis = N; axis-- > 0;) {
    operand.shape[axis] = shape[axis];
    operand.strides[axis] = stride;
    stride *= shape[axis];
  }
  return operand;
}

// An array of `extents`, seen as `shape`.
template <std::size_t N, std::size_t M>
NewArray new_array(const std::array<py::ssize_t, N>& extents, const ElementType& element,
                   const std::array<Int64, M>& shape) {
  const auto& api = py::detail::npy_api::get();
  Py_INCREF(element.numpy);
  PyObject* array = api.PyArray_NewFromDescr_(api.PyArray_Type_, element.numpy, static_cast<int>(N),
                                              extents.data(), nullptr, nullptr, 0, nullptr);
  if (array == nullptr) throw py::error_already_set();
  return {py::reinterpret_steal<py::object>(array),
          contiguous(py::detail::array_proxy(array)->data, element.dtype, shape)};
}

}  // namespace

ElementType float32_elements() { return {DType::kFloat32, float32()}; }

std::optional<HeadsView> heads_view(PyObject* object, Int64 heads) {
  const auto plain = plain_array(object);
  if (!plain || (plain->proxy->nd != 3 && plain->proxy->nd != 4)) return std::nullopt;
  const auto* array = plain->proxy;
  const auto* extent = array->dimensions;
  const auto stride = [&](int axis) -> Int64 {
    return extent[axis] < 2 ? 0 : array->strides[axis] / dtype_bytes(plain->dtype);
  };
  HeadsView view;
  view.ndim = array->nd;
  view.numpy_dtype = reinterpret_cast<PyObject*>(array->descr);
  Operand& to = view.heads;
  to.data = array->data;
  to.dtype = plain->dtype;
  to.ndim = 4;
  if (array->nd == 4) {
    to.shape = {extent[0], extent[1], extent[2], extent[3]};
    to.strides = {stride(0), stride(1), stride(2), 1};
    return view;
  }
  if (heads < 1 || extent[2] % heads != 0) return std::nullopt;
  const Int64 hd = extent[2] / heads;
  to.shape = {extent[0], extent[1], heads, hd};
  to.strides = {stride(0), stride(1), heads < 2 ? 0 : hd, 1};
  return view;
}

bool same_shape(const HeadsView& a, const HeadsView& b) { return a.heads.shape == b.heads.shape; }

std::optional<Operand> row_statistics(PyObject* object, const HeadsView& q) {
  const auto plain = plain_array(object);
  if (!plain || plain->dtype != DType::kFloat32) return std::nullopt;
  const auto* array = plain->proxy;
  const bool is_contiguous = (array->flags & py::detail::npy_api::NPY_ARRAY_C_CONTIGUOUS_) != 0;
  if (!is_contiguous || array->nd != 3 || array->dimensions[0] != q.B() ||
      array->dimensions[1] != q.H() || array->dimensions[2] != q.T()) {
    return std::nullopt;
  }
  return contiguous<3>(array->data, DType::kFloat32, {q.B(), q.H(), q.T()});
}

bool fit_together(const HeadsView& q, const HeadsView& k, const HeadsView& v) {
  const bool agree = k.B() == q.B() && k.hd() == q.hd() && k.ndim == q.ndim && v.ndim == q.ndim &&
                     q.H() % k.H() == 0;
  const DType of_q = q.heads.dtype, of_k = k.heads.dtype;
  const bool served = of_k == of_q || (of_q == DType::kFloat32 && is_half(of_k));
  return same_shape(k, v) && v.heads.dtype == of_k && served && agree &&
         std::max(q.H(), q.hd()) <= INT_MAX;
}

NewArray new_heads(const HeadsView& like, const ElementType& element) {
  const std::array<Int64, 4>& shape = like.heads.shape;
  if (like.ndim == 4) {
    return new_array<4, 4>({shape[0], shape[1], shape[2], shape[3]}, element, shape);
  }
  return new_array<3, 4>({shape[0], shape[1], shape[2] * shape[3]}, element, shape);
}

NewArray new_rows(const HeadsView& q) {
  return new_array<3, 3>({q.B(), q.H(), q.T()}, float32_elements(), {q.B(), q.H(), q.T()});
}

}  // namespace forge::bindings
