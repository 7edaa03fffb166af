#include "runtime/blocks.h"

#include <cstdlib>
#include <cstring>

#include "runtime/object.h"

#define SOFTMETAL_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// Bits of the flags word, fixed by the ABI.
constexpr int kBlockCountStep = 2;
constexpr int kBlockCountMask = 0xfffe;
constexpr int kBlockNeedsFree = 1 << 24;
constexpr int kBlockHasHelpers = 1 << 25;
constexpr int kBlockIsGlobal = 1 << 28;

// What a captured variable is.
constexpr int kFieldIsObject = 3;
constexpr int kFieldIsBlock = 7;
constexpr int kFieldIsByref = 8;
constexpr int kFieldMask = 15;

// A __block variable.
struct Byref {
  void* isa;
  Byref* forwarding;
  int flags;
  int size;
  void (*keep)(Byref* to, Byref* from);  // these two only with kBlockHasHelpers
  void (*destroy)(Byref* byref);
};

bool drop_reference(int* flags) {
  int before = __atomic_fetch_sub(flags, kBlockCountStep, __ATOMIC_ACQ_REL);
  return (before & kBlockCountMask) == kBlockCountStep;
}

Byref* copy_byref(Byref* from) {
  Byref* source = from->forwarding;
  if ((source->flags & kBlockNeedsFree) != 0) {
    __atomic_fetch_add(&source->flags, kBlockCountStep, __ATOMIC_RELAXED);
    return source;
  }
  auto* to = static_cast<Byref*>(std::malloc(static_cast<std::size_t>(source->size)));
  std::memcpy(static_cast<void*>(to), source, static_cast<std::size_t>(source->size));
  // One reference for the block that copies, one for the stack frame that owns the variable.
  to->flags = (source->flags & ~kBlockCountMask) | kBlockNeedsFree | 2 * kBlockCountStep;
  to->forwarding = to;
  source->forwarding = to;
  if ((source->flags & kBlockHasHelpers) != 0) source->keep(to, source);
  return to;
}

void release_byref(Byref* of) {
  Byref* byref = of->forwarding;
  if ((byref->flags & kBlockNeedsFree) == 0 || !drop_reference(&byref->flags)) return;
  if ((byref->flags & kBlockHasHelpers) != 0) byref->destroy(byref);
  std::free(byref);
}

}  // namespace

SOFTMETAL_EXPORT void* _NSConcreteGlobalBlock[32] = {};
SOFTMETAL_EXPORT void* _NSConcreteStackBlock[32] = {};
SOFTMETAL_EXPORT void* _NSConcreteMallocBlock[32] = {};

SOFTMETAL_EXPORT void* _Block_copy(const void* given) {
  auto* block = static_cast<softmetal::BlockLiteral*>(const_cast<void*>(given));
  if (block == nullptr || (block->flags & kBlockIsGlobal) != 0) return block;
  if ((block->flags & kBlockNeedsFree) != 0) {
    __atomic_fetch_add(&block->flags, kBlockCountStep, __ATOMIC_RELAXED);
    return block;
  }
  auto* copy = static_cast<softmetal::BlockLiteral*>(std::malloc(block->descriptor->size));
  std::memcpy(static_cast<void*>(copy), block, block->descriptor->size);
  copy->isa = _NSConcreteMallocBlock;
  copy->flags = (block->flags & ~kBlockCountMask) | kBlockNeedsFree | kBlockCountStep;
  if ((block->flags & kBlockHasHelpers) != 0) block->descriptor->copy(copy, block);
  return copy;
}

SOFTMETAL_EXPORT void _Block_release(const void* given) {
  auto* block = static_cast<softmetal::BlockLiteral*>(const_cast<void*>(given));
  if (block == nullptr || (block->flags & kBlockNeedsFree) == 0) return;
  if (!drop_reference(&block->flags)) return;
  if ((block->flags & kBlockHasHelpers) != 0) block->descriptor->dispose(block);
  std::free(block);
}

SOFTMETAL_EXPORT void _Block_object_assign(void* to, const void* from, int flags) {
  void* object = const_cast<void*>(from);
  switch (flags & kFieldMask) {
    case kFieldIsObject:
      if (object != nullptr) static_cast<softmetal::Object*>(object)->retain();
      break;
    case kFieldIsBlock:
      object = _Block_copy(from);
      break;
    case kFieldIsByref:
      object = copy_byref(static_cast<Byref*>(object));
      break;
    default:
      break;
  }
  *static_cast<void**>(to) = object;
}

SOFTMETAL_EXPORT void _Block_object_dispose(const void* given, int flags) {
  void* object = const_cast<void*>(given);
  switch (flags & kFieldMask) {
    case kFieldIsObject:
      if (object != nullptr) static_cast<softmetal::Object*>(object)->release();
      break;
    case kFieldIsBlock:
      _Block_release(object);
      break;
    case kFieldIsByref:
      release_byref(static_cast<Byref*>(object));
      break;
    default:
      break;
  }
}
