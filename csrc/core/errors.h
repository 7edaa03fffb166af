// What a wrong call throws. The bindings turn TypeError into Python's TypeError,
// std::invalid_argument into ValueError and std::bad_alloc into MemoryError.
#pragma once

#include <stdexcept>

namespace forge {

struct TypeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace forge
