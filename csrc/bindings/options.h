// The options of a call, out of the dict that the Python layer fills.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

#include "core/problem.h"

namespace forge::bindings {

// Everything about a call but its arrays.
struct Options : MaskAndScale {
  pybind11::object ranges =
      pybind11::none();  // int64 [B, 3]; None: all keys, the last query at the last key
  std::string kernel = "fused";
  std::string backend;     // empty: the first that serves
  std::string cpu_target;  // empty: the best
};

// Throws TypeError for a missing field or one of another type; ranges are checked against the
// problem later. The values are checked by core/validate.
Options options_of(const pybind11::dict& given);

// Throws std::invalid_argument for another kernel than the two.
Family family_of(const Options& options);

// Sets what the options say of a problem whose sizes are set: mask, scale and key ranges.
void set_options(const Options& options, Problem& problem);

}  // namespace forge::bindings
