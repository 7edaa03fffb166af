#pragma once

#include <pybind11/pybind11.h>

namespace forge::bindings {

// Adds attention_fwd, attention_bwd and the four materialized kernels to the module.
void register_attention(pybind11::module_& module);

}  // namespace forge::bindings
