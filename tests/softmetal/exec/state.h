// What the engine keeps while it runs a threadgroup. Private to exec/.
#pragma once

#include <cstdint>
#include <vector>

#include "exec/threadgroup.h"
#include "softmetal/race.h"

namespace softmetal {

enum ThreadState : unsigned char { kNew, kReady, kInSimdgroup, kAtBarrier, kDone };

struct Simdgroup {
  int first = 0;
  int size = 0;
  int live = 0;     // have not returned
  int arrived = 0;  // wait in the operation
  std::uint32_t mask = 0;
  std::uint32_t last_mask = 0;
  SimdOperation operation = SimdOperation::kBarrier;
  int line = 0;
  const Thread* came = nullptr;  // one of those that wait
};

struct Engine::State {
  const Dispatch* dispatch = nullptr;
  StackPool stacks;
  void* scheduler = nullptr;  // its stack pointer while threads run
  Failure failure;

  int size = 0;  // of the running threadgroup
  int done = 0;
  int at_barrier = 0;
  int barrier_line = 0;
  const Thread* at_barrier_first = nullptr;
  std::uint64_t clock = 0;  // threadgroup barriers passed, by any threadgroup so far
  std::uint64_t random_state = 0;

  Thread threads[kMaxThreads];
  unsigned char states[kMaxThreads];
  Simdgroup simdgroups[kMaxThreads / kSimdWidth];

  alignas(128) char memory[kMaxThreadgroupBytes];
  std::uint64_t writes[kMaxThreadgroupBytes / 4];
  std::uint64_t reads[kMaxThreadgroupBytes / 4];
  std::size_t memory_used = 0;
  std::size_t argument_bytes = 0;
  Launch launch;
  Binding arrays[kMaxThreadgroupArrays];
  bool array_known[kMaxThreadgroupArrays];

  Failure run(const Dispatch& given);
  void place_arguments();
  std::uint32_t random(std::uint32_t below);
  std::vector<std::uint32_t> order_of(std::uint32_t count);
  void start_group(std::uint32_t number);
  void run_group();
  void diagnose_stuck();
  void next_epoch();
  Thread* next_in_simdgroup(Thread* after);
  void leave(Thread* self, ThreadState state, int line);
  void enter(Thread* thread, void** from);
  void fail(bool access, const char* text);
};

extern SOFTMETAL_THREAD_LOCAL Engine::State* engine;

// Not a std::string: where a thread ends in a fault, nothing is destroyed.
struct Text {
  char of[640];
};
Text formatted(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace softmetal
