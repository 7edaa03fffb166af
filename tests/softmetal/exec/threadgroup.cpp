#include "exec/threadgroup.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "softmetal/race.h"

namespace softmetal {

SOFTMETAL_THREAD_LOCAL Counters counters = {};
SOFTMETAL_THREAD_LOCAL const Launch* launch = nullptr;
SOFTMETAL_THREAD_LOCAL Thread* current = nullptr;
SOFTMETAL_THREAD_LOCAL ThreadgroupState group = {};

namespace {

enum ThreadState : unsigned char { kNew, kReady, kInSimdgroup, kAtBarrier, kDone };

struct ThreadContext {
  void* stack_pointer = nullptr;
  int line = 0;  // where it waits
};

struct Simdgroup {
  int first = 0;
  int size = 0;
  int live = 0;     // have not returned
  int arrived = 0;  // wait in the operation
  std::uint32_t mask = 0;
  std::uint32_t last_mask = 0;
  SimdOperation operation = SimdOperation::kBarrier;
  int line = 0;
};

}  // namespace

struct Engine::State {
  const Dispatch* dispatch = nullptr;
  StackPool stacks;
  void* scheduler = nullptr;  // its stack pointer while threads run
  Failure failure;

  int size = 0;  // of the running threadgroup
  int done = 0;
  int at_barrier = 0;
  int barrier_line = 0;
  bool barrier_orders = false;
  std::uint64_t clock = 0;  // threadgroup barriers passed, by any threadgroup so far

  Thread threads[kMaxThreads];
  unsigned char states[kMaxThreads];
  ThreadContext contexts[kMaxThreads];
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
  void start_group(Position at);
  void run_group();
  void diagnose_stuck();
  void next_epoch();
  int next_in_simdgroup(int after) const;
  void leave(int from);
  void fail(bool access, const char* text);
};

namespace {

SOFTMETAL_THREAD_LOCAL Engine::State* engine = nullptr;

}  // namespace

// Where one thread of the running threadgroup ends, or waits, another goes on.
namespace {

// Not a std::string: where a thread ends in a fault, nothing is destroyed.
struct Text {
  char of[640];
};
Text formatted(const char* format, ...) __attribute__((format(printf, 1, 2)));
Text formatted(const char* format, ...) {
  Text text;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text.of, sizeof text.of, format, arguments);
  va_end(arguments);
  return text;
}

int self_index() { return int(current->index); }

void release_simdgroup(Engine::State& state, Simdgroup& simdgroup) {
  simdgroup.last_mask = simdgroup.mask;
  simdgroup.mask = 0;
  simdgroup.arrived = 0;
  bool orders = simdgroup.operation == SimdOperation::kMemoryBarrier;
  for (int i = simdgroup.first; i < simdgroup.first + simdgroup.size; ++i) {
    if (state.states[i] != kDone) state.states[i] = kReady;
    if (orders) state.threads[i].clock += std::uint64_t(1) << kStampSimdShift;
  }
  if (orders || simdgroup.operation == SimdOperation::kBarrier) ++counters.simdgroup_barriers;
}

// Runs kernels until nothing new is to start; the stack is used by one thread after another as long
// as none of them waits.
void fiber_main() {
  for (;;) {
    Engine::State& state = *engine;
    state.dispatch->kernel->run();
    int self = self_index();
    Simdgroup& simdgroup = state.simdgroups[current->simdgroup];
    state.states[self] = kDone;
    ++state.done;
    --simdgroup.live;
    bool active_only = simdgroup.operation == SimdOperation::kShuffle ||
                       simdgroup.operation == SimdOperation::kReduce;
    if (simdgroup.arrived != 0 && simdgroup.arrived == simdgroup.live && active_only) {
      release_simdgroup(state, simdgroup);
    }
    int next = self + 1;
    if (next < state.size && state.states[next] == kNew) {
      state.states[next] = kReady;
      current = &state.threads[next];
      continue;
    }
    softmetal_switch_stacks(&state.contexts[self].stack_pointer, state.scheduler);
  }
}

void enter(Engine::State& state, int index, void** from) {
  if (state.states[index] == kNew) {
    state.states[index] = kReady;
    state.contexts[index].stack_pointer = prepare_fiber(state.stacks.take(), fiber_main);
  }
  current = &state.threads[index];
  softmetal_switch_stacks(from, state.contexts[index].stack_pointer);
}

}  // namespace

void Engine::State::fail(bool access, const char* text) {
  if (failure) return;
  failure.access = access;
  failure.text = text;
}

// Ready or new, after `after` in the order of its simdgroup; -1 if there is none.
int Engine::State::next_in_simdgroup(int after) const {
  const Simdgroup& simdgroup = simdgroups[after / kSimdWidth];
  int end = simdgroup.first + simdgroup.size;
  for (int i = after + 1; i < end; ++i) {
    if (states[i] <= kReady) return i;
  }
  for (int i = simdgroup.first; i < after; ++i) {
    if (states[i] <= kReady) return i;
  }
  return -1;
}

// The current thread waits: another of its simdgroup runs, else the scheduler.
void Engine::State::leave(int from) {
  int next = next_in_simdgroup(from);
  if (next >= 0) {
    enter(*this, next, &contexts[from].stack_pointer);
  } else {
    softmetal_switch_stacks(&contexts[from].stack_pointer, scheduler);
  }
}

void Engine::State::next_epoch() {
  clock += std::uint64_t(1) << kStampGroupShift;
  if (clock == 0) {  // wrapped around: what was remembered would look new
    std::memset(writes, 0, sizeof writes);
    std::memset(reads, 0, sizeof reads);
    clock = std::uint64_t(1) << kStampGroupShift;
  }
  for (int i = 0; i < size; ++i) threads[i].clock = clock | std::uint64_t(i);
}

void threadgroup_barrier_wait(bool orders_threadgroup_memory, int line) noexcept {
  Engine::State& state = *engine;
  int self = self_index();
  if (state.at_barrier != 0 && state.barrier_line != line) {
    fault_text(formatted("threads of one threadgroup wait at different barriers, lines %d and %d",
                         state.barrier_line, line)
                   .of,
               line);
  }
  state.barrier_line = line;
  state.barrier_orders = orders_threadgroup_memory;
  if (++state.at_barrier < state.size) {
    state.states[self] = kAtBarrier;
    state.contexts[self].line = line;
    state.leave(self);
    return;
  }
  state.at_barrier = 0;
  ++counters.threadgroup_barriers;
  std::memset(state.states, kReady, std::size_t(state.size));
  if (orders_threadgroup_memory) state.next_epoch();
}

uint32_t simd_wait(SimdOperation operation, int line, SimdCallback last) noexcept {
  Engine::State& state = *engine;
  int self = self_index();
  Simdgroup& simdgroup = state.simdgroups[current->simdgroup];
  if (simdgroup.arrived != 0 && (simdgroup.operation != operation || simdgroup.line != line)) {
    fault_text(formatted("threads of one simdgroup wait at different simdgroup operations, lines "
                         "%d and %d",
                         simdgroup.line, line)
                   .of,
               line);
  }
  simdgroup.operation = operation;
  simdgroup.line = line;
  simdgroup.mask |= std::uint32_t(1) << current->lane;
  bool barrier = operation == SimdOperation::kBarrier || operation == SimdOperation::kMemoryBarrier;
  bool whole = barrier || operation == SimdOperation::kMatrix;
  if (++simdgroup.arrived < (whole ? simdgroup.size : simdgroup.live)) {
    state.states[self] = kInSimdgroup;
    state.contexts[self].line = line;
    state.leave(self);
    return simdgroup.last_mask;
  }
  if (last != nullptr) last(&state.threads[simdgroup.first], simdgroup.mask);
  release_simdgroup(state, simdgroup);
  return simdgroup.last_mask;
}

const Binding* threadgroup_array_binding(int id, size_t size, size_t alignment,
                                         const char* name) noexcept {
  Engine::State& state = *engine;
  if (id >= kMaxThreadgroupArrays) fault_text("too many threadgroup arrays in one program", 0);
  Binding& binding = state.arrays[id];
  if (state.array_known[id]) return &binding;
  std::size_t start = (state.memory_used + alignment - 1) / alignment * alignment;
  if (start + size > std::size_t(kMaxThreadgroupBytes)) {
    fault_text(formatted("threadgroup memory exceeds %d bytes with '%s' of %zu bytes after %zu",
                         kMaxThreadgroupBytes, name, size, start)
                   .of,
               0);
  }
  const char* begin = state.memory + start;
  binding = {begin, begin + size, begin, begin + size, begin, name, "threadgroup memory"};
  state.memory_used = start + size;
  state.array_known[id] = true;
  return &binding;
}

void fault_text(const char* text, int line) noexcept {
  Engine::State& state = *engine;
  Position at = current->in_grid;
  Text where = line > 0 ? formatted("line %d: ", line) : Text{""};
  state.fail(false,
             formatted("%s%s (thread (%u, %u, %u) in grid)", where.of, text, at.x, at.y, at.z).of);
  void* abandoned;
  softmetal_switch_stacks(&abandoned, state.scheduler);
  __builtin_unreachable();
}

void fault_access(const Binding* binding, const void* address, size_t size, bool store) noexcept {
  Engine::State& state = *engine;
  auto at = reinterpret_cast<std::uintptr_t>(address);
  auto base = reinterpret_cast<std::uintptr_t>(binding->base);
  bool inside = !(at < reinterpret_cast<std::uintptr_t>(binding->begin) ||
                  at + size > reinterpret_cast<std::uintptr_t>(binding->end));
  auto offset = static_cast<long long>(static_cast<std::intptr_t>(at - base));
  long long index = offset / static_cast<long long>(size);
  Position thread = current->in_grid;
  const char* what = inside ? "to memory that is not writeable" : "outside the range";
  state.fail(true, formatted("%s %s: argument '%s', index %lld (byte offset %lld, %zu bytes), "
                             "marked range [%lld, %lld) of %s, thread (%u, %u, %u) in grid",
                             store ? "store" : "load", what, binding->argument, index, offset, size,
                             static_cast<long long>(binding->begin - binding->base),
                             static_cast<long long>(binding->end - binding->base), binding->label,
                             thread.x, thread.y, thread.z)
                       .of);
  void* abandoned;
  softmetal_switch_stacks(&abandoned, state.scheduler);
  __builtin_unreachable();
}

void fault_race(const Binding* binding, const void* address, uint64_t other, bool store,
                bool other_store) noexcept {
  std::uint64_t who = other & kStampThreadMask;
  Text text;
  if (who == kOfMany) {
    text = {"threads of several simdgroups"};
  } else if (who >= kOfSimdgroup) {
    text = formatted("threads of simdgroup %d", int(who - kOfSimdgroup));
  } else {
    text = formatted("thread %d", int(who));
  }
  auto offset = static_cast<const char*>(address) - binding->base;
  fault_text(
      formatted("data race on threadgroup memory '%s', byte offset %td: thread %u %s what %s "
                "%s, with no barrier between",
                binding->argument, offset, current->index, store ? "stores" : "loads", text.of,
                other_store ? "stored" : "loaded")
          .of,
      0);
}

void Engine::State::place_arguments() {
  launch = dispatch->launch;
  argument_bytes = 0;
  for (int i = 0; i < kMaxBuffers; ++i) {
    std::size_t bytes = dispatch->threadgroup_argument_bytes[i];
    if (bytes == 0) continue;
    Binding& binding = launch.threadgroup_arguments[i];
    const char* begin = memory + argument_bytes;
    binding = {
        begin, begin + bytes, begin, begin + bytes, begin, binding.argument, "threadgroup memory"};
    argument_bytes += (bytes + 15) / 16 * 16;
  }
}

void Engine::State::start_group(Position at) {
  const Position whole = launch.threads_per_threadgroup;
  const Position grid = launch.threads_per_grid;
  Position origin = {at.x * whole.x, at.y * whole.y, at.z * whole.z};
  Position extent = {std::min(whole.x, grid.x - origin.x), std::min(whole.y, grid.y - origin.y),
                     std::min(whole.z, grid.z - origin.z)};
  size = int(extent.x * extent.y * extent.z);
  done = at_barrier = 0;
  int index = 0;
  int count = (size + kSimdWidth - 1) / kSimdWidth;
  for (std::uint32_t z = 0; z < extent.z; ++z) {
    for (std::uint32_t y = 0; y < extent.y; ++y) {
      for (std::uint32_t x = 0; x < extent.x; ++x, ++index) {
        Thread& thread = threads[index];
        thread.in_grid = {origin.x + x, origin.y + y, origin.z + z};
        thread.in_threadgroup = {x, y, z};
        thread.threadgroup = at;
        thread.threadgroup_size = extent;
        thread.index = std::uint32_t(index);
        thread.lane = thread.index % kSimdWidth;
        thread.simdgroup = thread.index / kSimdWidth;
        thread.simdgroups = std::uint32_t(count);
        thread.operations = 0;
      }
    }
  }
  std::memset(states, kNew, std::size_t(size));
  for (int i = 0; i < count; ++i) {
    int first = i * kSimdWidth;
    int in_group = std::min(kSimdWidth, size - first);
    simdgroups[i] = {first, in_group, in_group, 0, 0, 0, SimdOperation::kBarrier, 0};
  }
  // NaN, so that reading what nobody wrote shows.
  std::memset(memory, 0xff, std::max(memory_used, argument_bytes));
  memory_used = argument_bytes;
  std::memset(array_known, 0, sizeof array_known);
  next_epoch();
}

void Engine::State::diagnose_stuck() {
  std::string text;
  if (at_barrier != 0) {
    text = formatted("line %d: threadgroup_barrier reached by %d of %d threads", barrier_line,
                     at_barrier, size)
               .of;
    if (done != 0) text += formatted("; %d had returned", done).of;
  } else {
    text = "a simdgroup operation was not reached by all threads of its simdgroup";
  }
  for (int i = 0; i < size; ++i) {
    if (states[i] != kInSimdgroup) continue;
    text += formatted("; thread %d waits at the simdgroup operation or barrier of line %d", i,
                      contexts[i].line)
                .of;
    break;
  }
  fail(false, text.c_str());
}

void Engine::State::run_group() {
  int from = 0;
  while (done < size && !failure) {
    int next = -1;
    for (int step = 0; step < size && next < 0; ++step) {
      int i = from + step < size ? from + step : from + step - size;
      if (states[i] <= kReady) next = i;
    }
    if (next < 0) {
      diagnose_stuck();
      break;
    }
    from = next;
    enter(*this, next, &scheduler);
  }
  stacks.give_all_back();
}

Failure Engine::State::run(const Dispatch& given) {
  dispatch = &given;
  failure = Failure();
  place_arguments();
  softmetal::launch = &launch;
  group = {memory, writes, reads, threads};
  const Position groups = launch.threadgroups_per_grid;
  for (std::uint32_t z = 0; z < groups.z && !failure; ++z) {
    for (std::uint32_t y = 0; y < groups.y && !failure; ++y) {
      for (std::uint32_t x = 0; x < groups.x && !failure; ++x) {
        start_group({x, y, z});
        run_group();
      }
    }
  }
  if (failure) failure.text = std::string("kernel ") + given.kernel->name + ": " + failure.text;
  return failure;
}

Engine::Engine() : state_(new State()) {}
Engine::~Engine() = default;

Failure Engine::run(const Dispatch& dispatch, Counters* into) {
  engine = state_.get();
  counters = {};
  Failure failure = state_->run(dispatch);
  *into = counters;
  engine = nullptr;
  return failure;
}

}  // namespace softmetal
