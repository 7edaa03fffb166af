#pragma once

#include <pybind11/pybind11.h>

namespace forge::bindings {

// Adds run to the module: one call with all its arrays, checked.
void register_attention(pybind11::module_& module);

}  // namespace forge::bindings
