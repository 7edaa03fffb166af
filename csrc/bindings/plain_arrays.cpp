#include "bindings/plain_arrays.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <array>
#include <climits>

namespace py = pybind11;

namespace forge::bindings {
namespace {

PyObject* float32() {
  static PyObject* const dtype = py::detail::npy_api::get().PyArray_DescrFromType_(
      py::detail::npy_api::NPY_FLOAT_);  // never let go
  return dtype;
}

// Null for what is not plain.
const py::detail::PyArray_Proxy* plain_array(PyObject* object) {
  if (Py_TYPE(object) != py::detail::npy_api::get().PyArray_Type_) return nullptr;
  const auto* array = py::detail::array_proxy(object);
  const bool aligned = (array->flags & py::detail::npy_api::NPY_ARRAY_ALIGNED_) != 0;
  if (array->descr != float32() || !aligned || array->nd < 1) return nullptr;
  for (int axis = 0; axis < array->nd; ++axis) {
    if (array->dimensions[axis] < 1) return nullptr;
  }
  const int last = array->nd - 1;
  const bool unit = array->dimensions[last] == 1 || array->strides[last] == sizeof(float);
  return unit ? array : nullptr;
}

// Contiguous axes in front of the float at `data`.
template <std::size_t N>
Operand contiguous(float* data, const std::array<Int64, N>& shape) {
  Operand operand;
  operand.data = data;
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
NewArray new_array(const std::array<py::ssize_t, N>& extents, const std::array<Int64, M>& shape) {
  const auto& api = py::detail::npy_api::get();
  Py_INCREF(float32());
  PyObject* array = api.PyArray_NewFromDescr_(api.PyArray_Type_, float32(), static_cast<int>(N),
                                              extents.data(), nullptr, nullptr, 0, nullptr);
  if (array == nullptr) throw py::error_already_set();
  return {py::reinterpret_steal<py::object>(array),
          contiguous(reinterpret_cast<float*>(py::detail::array_proxy(array)->data), shape)};
}

}  // namespace

std::optional<HeadsView> heads_view(PyObject* object, Int64 heads) {
  const auto* array = plain_array(object);
  if (array == nullptr || (array->nd != 3 && array->nd != 4)) return std::nullopt;
  const auto* extent = array->dimensions;
  const auto stride = [&](int axis) -> Int64 {
    return extent[axis] < 2 ? 0 : array->strides[axis] / static_cast<Int64>(sizeof(float));
  };
  HeadsView view;
  view.ndim = array->nd;
  Operand& to = view.heads;
  to.data = array->data;
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
  const auto* array = plain_array(object);
  const bool contiguous_array =
      array != nullptr && (array->flags & py::detail::npy_api::NPY_ARRAY_C_CONTIGUOUS_) != 0;
  if (!contiguous_array || array->nd != 3 || array->dimensions[0] != q.B() ||
      array->dimensions[1] != q.H() || array->dimensions[2] != q.T()) {
    return std::nullopt;
  }
  return contiguous<3>(reinterpret_cast<float*>(array->data), {q.B(), q.H(), q.T()});
}

bool fit_together(const HeadsView& q, const HeadsView& k, const HeadsView& v) {
  const bool agree = k.B() == q.B() && k.hd() == q.hd() && k.ndim == q.ndim && v.ndim == q.ndim &&
                     q.H() % k.H() == 0;
  return same_shape(k, v) && agree && std::max(q.H(), q.hd()) <= INT_MAX;
}

NewArray new_heads(const HeadsView& like) {
  const std::array<Int64, 4>& shape = like.heads.shape;
  if (like.ndim == 4) {
    return new_array<4, 4>({shape[0], shape[1], shape[2], shape[3]}, shape);
  }
  return new_array<3, 4>({shape[0], shape[1], shape[2] * shape[3]}, shape);
}

NewArray new_rows(const HeadsView& q) {
  return new_array<3, 3>({q.B(), q.H(), q.T()}, {q.B(), q.H(), q.T()});
}

}  // namespace forge::bindings
