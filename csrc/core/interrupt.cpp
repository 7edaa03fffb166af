#include "core/interrupt.h"

#include <chrono>

namespace forge {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kInterval = std::chrono::milliseconds(50);

struct Current {
  InterruptScope::Check check = nullptr;
  void* context = nullptr;
  Clock::time_point last;
};
thread_local Current current;

}  // namespace

InterruptScope::InterruptScope(Check check, void* context) {
  current = {check, context, Clock::now()};
}

InterruptScope::~InterruptScope() { current = {}; }

bool interrupt_asked() {
  if (current.check == nullptr) return false;
  const Clock::time_point now = Clock::now();
  if (now - current.last < kInterval) return false;
  const bool asked = current.check(current.context);
  current.last = Clock::now();
  return asked;
}

}  // namespace forge
