// Runs kernels while other Python threads run.
#pragma once

#include <pybind11/pybind11.h>

#include "bindings/gil.h"
#include "core/interrupt.h"

namespace forge::bindings {

// On the main thread a long body gives way to signals: what a handler raises, KeyboardInterrupt for
// one, comes as py::error_already_set.
template <typename Body>
auto without_gil(const Body& body) {
  try {
    GilRelease release;
    if (!on_main_thread()) return body();
    const InterruptScope scope(
        [](void* gil) { return static_cast<GilRelease*>(gil)->handler_raised(); }, &release);
    return body();
  } catch (const Interrupted&) {
    throw pybind11::error_already_set();
  }
}

}  // namespace forge::bindings
