// What a wrong call throws. The bindings turn TypeError into Python's TypeError, TooLarge and
// std::bad_alloc into MemoryError, and std::invalid_argument into ValueError.
#pragma once

#include <stdexcept>

namespace forge {

// More memory than there is, in words; MemoryError.
struct TooLarge : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct TypeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace forge
