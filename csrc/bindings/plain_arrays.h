// NumPy's own arrays of float32, float16 and bfloat16, told and made in a few instructions.
// `arrays` is for all others.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "core/operands.h"

namespace forge::bindings {

struct ElementType {
  DType dtype;
  PyObject* numpy;  // NumPy's dtype, kept alive by whoever named it
};
ElementType float32_elements();

// A plain array as [B, T, heads, hd]: an ndarray, no subclass, aligned, of one of the three types
// in native order, without an axis of no extent and with a last axis of unit stride.
struct HeadsView {
  Operand heads;          // [B, T, heads, hd]
  int ndim;               // 4, or 3 where heads and hd share an axis
  PyObject* numpy_dtype;  // the array's own

  ElementType element() const { return {heads.dtype, numpy_dtype}; }

  Int64 B() const { return heads.shape[0]; }
  Int64 T() const { return heads.shape[1]; }
  Int64 H() const { return heads.shape[2]; }
  Int64 hd() const { return heads.shape[3]; }
  Int64 rows() const { return B() * T() * H(); }
};

// Nothing for what is not plain. heads: of an array of three axes, at least 1.
std::optional<HeadsView> heads_view(PyObject* object, Int64 heads);

// Whether q, k and v make a problem.
bool fit_together(const HeadsView& q, const HeadsView& k, const HeadsView& v);
bool same_shape(const HeadsView& a, const HeadsView& b);

// A plain, C-contiguous float32 [B, H, Tq]; nothing for anything else.
std::optional<Operand> row_statistics(PyObject* object, const HeadsView& q);

// New C-contiguous arrays. Throw py::error_already_set where there is no memory.
struct NewArray {
  pybind11::object object;
  Operand operand;
};
NewArray new_heads(const HeadsView& like, const ElementType& element);  // of its shape
NewArray new_rows(const HeadsView& q);                                  // float32 [B, H, Tq]

}  // namespace forge::bindings
