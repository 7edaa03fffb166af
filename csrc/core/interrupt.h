// How a long call gives way to its caller's signals.
#pragma once

#include <exception>

namespace forge {

// Thrown on the calling thread when a call has given way; what the outputs hold is then undefined.
struct Interrupted : std::exception {
  const char* what() const noexcept override { return "the call was interrupted"; }
};

// While it lives, calls of this thread ask `check` now and then whether to give way. Threads
// without one never do.
class InterruptScope {
 public:
  using Check = bool (*)(void* context);
  InterruptScope(Check check, void* context);
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;
};

// Asks the check of this thread's scope, but not more often than each 50 ms; false without a scope.
bool interrupt_asked();

}  // namespace forge
