// What translated kernels and the device that runs them agree on. Nothing here includes a standard
// C++ header: their names would mix with those of namespace metal.
#pragma once

#include <stddef.h>
#include <stdint.h>

// Kernels count in plain thread-local integers; the model keeps an access to one instruction.
#define SOFTMETAL_THREAD_LOCAL thread_local __attribute__((tls_model("initial-exec")))

namespace softmetal {

struct Counters {
  uint64_t device_bytes_loaded;
  uint64_t device_bytes_stored;
  uint64_t threadgroup_bytes_loaded;
  uint64_t threadgroup_bytes_stored;
  uint64_t fmas;
  uint64_t matrix_products;  // 8x8x8 each, 512 of fmas
  uint64_t exps;
  uint64_t threadgroup_barriers;  // once a threadgroup
  uint64_t simdgroup_barriers;    // once a simdgroup
};

struct DeviceShadow;  // see race.h

// The bytes that a kernel argument may touch. Pointers, not integers: the optimizer then knows that
// counting does not change them.
struct Binding {
  const char* begin;
  const char* end;
  const char* store_begin;  // an empty range where nothing may be written
  const char* store_end;
  const char* base;      // where index 0 is
  const char* argument;  // the kernel's name for it
  const char* label;     // the debug marker, or what the memory is
  // Who touched these bytes in this dispatch; nullptr where no argument of it may write them.
  const DeviceShadow* shadow;
};

constexpr int kSimdWidth = 32;
constexpr int kMaxThreads = 1024;  // of a threadgroup
constexpr int kMaxBuffers = 31;
constexpr int kMaxThreadgroupBytes = 32768;
constexpr int kMaxThreadgroupArrays = 64;

struct Position {
  uint32_t x, y, z;
};

// What the language leaves open, as the device's seed chose it; all zero: the plainest.
struct Freedom {
  uint32_t noise;          // of functions that need not round correctly; 0: none
  uint32_t product_order;  // of the sums in a matrix product, below kProductOrders; see matrix.h
};
constexpr uint32_t kProductOrders = 6;

// What is the same for every thread of a dispatch.
struct Launch {
  Freedom freedom;
  Position threads_per_grid;
  Position threads_per_threadgroup;  // as dispatched; groups at the edge may be smaller
  Position threadgroups_per_grid;
  Binding buffers[kMaxBuffers];
  Binding threadgroup_arguments[kMaxBuffers];
};

// How a thread came to where it is, see branch.h: through what that holds simdgroup operations, and
// through what of it that holds threadgroup barriers.
struct Way {
  uint32_t path, rounds;
  uint32_t barrier_path, barrier_rounds;
};

// What a thread knows about itself; the execution engine keeps more behind it.
struct Thread {
  Position in_grid;
  Position in_threadgroup;
  Position threadgroup;
  Position threadgroup_size;
  uint32_t index;      // in the threadgroup
  uint32_t lane;       // in the simdgroup
  uint32_t simdgroup;  // in the threadgroup
  uint32_t simdgroups;
  uint64_t clock;  // see race.h
  Way way;
  uint32_t operations;             // simdgroup operations so far
  alignas(16) char values[2][16];  // what it gave to the last two of them
  void* operands[4];
  void* stack_pointer;  // while it waits
  int line;             // where it waits
};

struct ThreadgroupState {
  char* memory;
  uint64_t* writes;  // a stamp for each 4 bytes of memory
  uint64_t* reads;
  Thread* threads;
  uint32_t number;  // from 1, in the dispatch
};

extern SOFTMETAL_THREAD_LOCAL Counters counters;
extern SOFTMETAL_THREAD_LOCAL const Launch* launch;
extern SOFTMETAL_THREAD_LOCAL Thread* current;
extern SOFTMETAL_THREAD_LOCAL ThreadgroupState group;

// The end of a thread that did what it must not: it never returns, and nothing is unwound.
[[noreturn]] void fault_text(const char* text, int line) noexcept;
[[noreturn]] void fault_access(const Binding* binding, const void* address, size_t size,
                               size_t alignment, bool store) noexcept;
[[noreturn]] void fault_race(const Binding* binding, const void* address, uint64_t other,
                             bool store, bool other_store) noexcept;
[[noreturn]] void fault_device_race(const Binding* binding, const void* address, uint32_t other,
                                    bool store, bool other_store) noexcept;

// Memory of a `threadgroup` array that a kernel declares; the same for every thread of the group.
const Binding* threadgroup_array_binding(int id, size_t size, size_t alignment,
                                         const char* name) noexcept;

void threadgroup_barrier_wait(bool orders_threadgroup_memory, int line) noexcept;

enum class SimdOperation { kBarrier, kMemoryBarrier, kShuffle, kReduce, kMatrix };

// Blocks until every live thread of the simdgroup is at the same operation; the last to come calls
// `last`, if there is one, for all of them. Returns the mask of the lanes that took part.
using SimdCallback = void (*)(Thread* first, uint32_t mask);
uint32_t simd_wait(SimdOperation operation, int line, SimdCallback last) noexcept;

// The tables that the translator writes.
enum class ArgumentKind { kBuffer, kThreadgroup, kBuiltin };

struct Argument {
  const char* name;
  ArgumentKind kind;
  int index;
  const char* enabled_by;  // a function constant, or nullptr
  size_t least_bytes;      // what a binding must hold at least, 0 if that is unknown
  size_t alignment;
  bool stores;  // the kernel may write there
};

struct FunctionConstant {
  const char* name;
  int index;
  int type;  // MTLDataType
  void (*set)(const void* value);
};

struct Kernel {
  const char* name;
  void (*run)();
  const Argument* arguments;
  int argument_count;
  const char* const* constants;  // names of the function constants that it reads
  int constant_count;
  int max_threads;    // of a threadgroup, as the kernel declares it; 0: not declared
  bool instantiated;  // by a line of its own, which a text may leave out
};

struct Program {
  uint64_t text_hash;
  uint64_t stem_hash;  // of the text without what lines of instantiations say
  const Kernel* kernels;
  int kernel_count;
  const FunctionConstant* constants;
  int constant_count;
};

// Defined by the translated text.
extern const Program program;

}  // namespace softmetal
