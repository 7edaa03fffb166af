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

template <std::size_t N>
py::object new_array(const std::array<Int64, N>& shape) {
  const auto& api = py::detail::npy_api::get();
  Py_INCREF(float32());
  std::array<py::ssize_t, N> extents;
  std::copy(shape.begin(), shape.end(), extents.begin());
  PyObject* array = api.PyArray_NewFromDescr_(api.PyArray_Type_, float32(), static_cast<int>(N),
                                              extents.data(), nullptr, nullptr, 0, nullptr);
  if (array == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(array);
}

}  // namespace

std::optional<HeadsView> heads_view(PyObject* object, Int64 heads) {
  const auto* array = plain_array(object);
  if (array == nullptr || (array->nd != 3 && array->nd != 4)) return std::nullopt;
  const auto* extent = array->dimensions;
  const auto stride = [&](int axis) -> Int64 {
    return extent[axis] < 2 ? 0 : array->strides[axis] / static_cast<Int64>(sizeof(float));
  };
  HeadsView view{};
  view.data = reinterpret_cast<float*>(array->data);
  view.B = extent[0];
  view.T = extent[1];
  view.ndim = array->nd;
  if (array->nd == 4) {
    view.heads = extent[2];
    view.hd = extent[3];
    view.strides = {stride(0), stride(1), stride(2), 0};
    return view;
  }
  if (heads < 1 || extent[2] % heads != 0) return std::nullopt;
  view.heads = heads;
  view.hd = extent[2] / heads;
  view.strides = {stride(0), stride(1), heads < 2 ? 0 : view.hd, 0};
  return view;
}

bool same_shape(const HeadsView& a, const HeadsView& b) {
  return a.B == b.B && a.T == b.T && a.heads == b.heads && a.hd == b.hd;
}

const float* row_statistics(PyObject* object, const HeadsView& q) {
  const auto* array = plain_array(object);
  const bool contiguous =
      array != nullptr && (array->flags & py::detail::npy_api::NPY_ARRAY_C_CONTIGUOUS_) != 0;
  if (!contiguous || array->nd != 3 || array->dimensions[0] != q.B ||
      array->dimensions[1] != q.heads || array->dimensions[2] != q.T) {
    return nullptr;
  }
  return reinterpret_cast<const float*>(array->data);
}

bool fit_together(const HeadsView& q, const HeadsView& k, const HeadsView& v) {
  const bool same = v.T == k.T && v.heads == k.heads && v.hd == k.hd;
  const bool agree = k.B == q.B && v.B == q.B && k.hd == q.hd && k.ndim == q.ndim &&
                     v.ndim == q.ndim && q.heads % k.heads == 0;
  return same && agree && std::max(q.heads, q.hd) <= INT_MAX;
}

py::object new_heads(int ndim, Int64 B, Int64 T, Int64 heads, Int64 hd) {
  if (ndim == 4) return new_array<4>({B, T, heads, hd});
  return new_array<3>({B, T, heads * hd});
}

py::object new_rows(const HeadsView& q) { return new_array<3>({q.B, q.heads, q.T}); }

float* data_of(const py::object& array) {
  return reinterpret_cast<float*>(py::detail::array_proxy(array.ptr())->data);
}

AttnStrides contiguous_strides(Int64 T, Int64 heads, Int64 hd) {
  return {T * heads * hd, heads * hd, hd, 0};
}

}  // namespace forge::bindings
