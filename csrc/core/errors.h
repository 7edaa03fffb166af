// What a wrong call throws. The bindings turn TypeError into Python's TypeError, TooLarge and
// std::bad_alloc into MemoryError, and std::invalid_argument into ValueError.
#pragma once

#include <stdexcept>

namespace forge {

// More memory than there is, in words; MemoryError.
struct TooLarge : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// No backend, or not the one that was named, can serve the problem; a ValueError of its own type.
struct NotServed : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

struct TypeError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

}  // namespace forge
