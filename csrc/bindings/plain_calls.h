// Calls that cost little: NumPy's own float32 arrays, plain options, new results, the fused kernels
// on the CPU. Everything else is left to the Python layer, which copies, explains and refuses.
#pragma once

#include <pybind11/pybind11.h>

namespace forge::bindings {

// Adds attention, attention_forward, attention_backward and last_plain_run to the module. The first
// three return None, with nothing touched, for a call that is not plain.
void register_plain_calls(pybind11::module_& module);

// last_plain_run() is None from here on, until the next plain call of this thread.
void forget_plain_run();

}  // namespace forge::bindings
