// bfloat16 from other libraries: NumPy reads DLPack, but has no bfloat16.
#pragma once

#include <pybind11/pybind11.h>

namespace forge::bindings {

// Adds bfloat16_bits to the module.
void register_dlpack(pybind11::module_& module);

}  // namespace forge::bindings
