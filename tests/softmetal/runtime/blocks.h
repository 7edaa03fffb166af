// Blocks, clang's closures: how they lie in memory, and the runtime functions that copy them.
#pragma once

extern "C" void* _Block_copy(const void* block);
extern "C" void _Block_release(const void* block);

namespace softmetal {

struct BlockDescriptor {
  unsigned long reserved;
  unsigned long size;
  void (*copy)(void* to, const void* from);  // these two only with kBlockHasHelpers
  void (*dispose)(const void* block);
};

struct BlockLiteral {
  void* isa;
  int flags;  // the low bits count references
  int reserved;
  void* invoke;  // a function of the block's own type, the block first
  const BlockDescriptor* descriptor;
};

template <typename... Args>
void call_block(void* block, Args... args) {
  auto* literal = static_cast<BlockLiteral*>(block);
  reinterpret_cast<void (*)(void*, Args...)>(literal->invoke)(block, args...);
}

}  // namespace softmetal
