#include "exec/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <new>

#if defined(__x86_64__)

// Callee-saved in the System V ABI: rbx, rbp, r12 to r15. The rounding mode is never changed.
asm(R"(
.text
.globl softmetal_switch_stacks
.hidden softmetal_switch_stacks
.type softmetal_switch_stacks, @function
softmetal_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  retq
.size softmetal_switch_stacks, .-softmetal_switch_stacks
)");

namespace {
constexpr std::size_t kFrameWords = 8;  // six registers, the entry, and the entry's return address
constexpr std::size_t kEntryWord = 6;
}  // namespace

#elif defined(__aarch64__)

asm(R"(
.text
.globl softmetal_switch_stacks
.hidden softmetal_switch_stacks
.type softmetal_switch_stacks, %function
softmetal_switch_stacks:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size softmetal_switch_stacks, .-softmetal_switch_stacks
)");

namespace {
constexpr std::size_t kFrameWords = 20;
constexpr std::size_t kEntryWord = 11;  // x30
}  // namespace

#else
#error "the software Metal device runs on x86-64 and 64-bit ARM"
#endif

namespace softmetal {

namespace {

constexpr std::size_t kStackBytes = std::size_t(128) << 10;
// Tops differ by this much from stack to stack, else all of them share a few cache sets.
constexpr std::size_t kColours = 32;
constexpr std::size_t kColourBytes = 448;

Stack* new_stack(std::size_t number) {
  void* bytes = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (bytes == MAP_FAILED) throw std::bad_alloc();
  mprotect(bytes, std::size_t(sysconf(_SC_PAGESIZE)), PROT_NONE);
  auto* stack = new Stack;
  stack->bytes = static_cast<char*>(bytes);
  stack->top = stack->bytes + kStackBytes - (number % kColours) * kColourBytes;
  return stack;
}

}  // namespace

void* prepare_fiber(Stack* stack, FiberEntry entry) {
  auto* frame = reinterpret_cast<std::uint64_t*>(stack->top) - kFrameWords;
  std::memset(frame, 0, kFrameWords * sizeof *frame);
  frame[kEntryWord] = reinterpret_cast<std::uintptr_t>(entry);
  return frame;
}

StackPool::~StackPool() {
  for (Stack* stack : stacks_) {
    munmap(stack->bytes, kStackBytes);
    delete stack;
  }
}

Stack* StackPool::take() {
  if (taken_ == stacks_.size()) stacks_.push_back(new_stack(stacks_.size()));
  return stacks_[taken_++];
}

void StackPool::give_all_back() { taken_ = 0; }

}  // namespace softmetal
