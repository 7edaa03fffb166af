// Stacks and the switch between them: a few nanoseconds, since nothing but callee-saved registers
// is kept.
#pragma once

#include <cstddef>
#include <vector>

namespace softmetal {

using FiberEntry = void (*)();

struct Stack {
  char* bytes = nullptr;  // the lowest page is not accessible
  char* top = nullptr;
};

// Where a fiber that has not run yet starts: hand the result to switch_stacks.
void* prepare_fiber(Stack* stack, FiberEntry entry);

// Stacks of one executing CPU thread, kept for the next threadgroup.
class StackPool {
 public:
  StackPool() = default;
  StackPool(const StackPool&) = delete;
  StackPool& operator=(const StackPool&) = delete;
  ~StackPool();
  Stack* take();
  void give_all_back();

 private:
  std::vector<Stack*> stacks_;
  std::size_t taken_ = 0;
};

}  // namespace softmetal

// Saves this context's stack pointer in *from and continues on `to`.
extern "C" void softmetal_switch_stacks(void** from, void* to);
