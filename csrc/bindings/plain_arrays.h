// NumPy's own float32 arrays, told and made in a few instructions. `arrays` is for all others.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "shared/attn_params.h"

namespace forge::bindings {

// A plain array as [B, T, heads, hd]: an ndarray, no subclass, of aligned float32 in native order,
// without an axis of no extent and with a last axis of unit stride.
struct HeadsView {
  float* data;
  Int64 B, T, heads, hd;
  AttnStrides strides;
  int ndim;  // 4, or 3 where heads and hd share an axis

  Int64 rows() const { return B * T * heads; }
};

// Nothing for what is not plain. heads: of an array of three axes, at least 1.
std::optional<HeadsView> heads_view(PyObject* object, Int64 heads);

// Whether q, k and v make a problem.
bool fit_together(const HeadsView& q, const HeadsView& k, const HeadsView& v);
bool same_shape(const HeadsView& a, const HeadsView& b);

// The data of a plain, C-contiguous [B, H, Tq]; null for anything else.
const float* row_statistics(PyObject* object, const HeadsView& q);

// New C-contiguous float32 arrays. Throw py::error_already_set where there is no memory.
pybind11::object new_heads(int ndim, Int64 B, Int64 T, Int64 heads, Int64 hd);
pybind11::object new_rows(const HeadsView& q);  // [B, H, Tq]

float* data_of(const pybind11::object& array);
AttnStrides contiguous_strides(Int64 T, Int64 heads, Int64 hd);

}  // namespace forge::bindings
