// Where threads wait for one another: barriers and simdgroup operations.
#include <cstring>

#include "exec/state.h"

namespace softmetal {

namespace {

void release_simdgroup(Engine::State& state, Simdgroup& simdgroup) {
  simdgroup.last_mask = simdgroup.mask;
  simdgroup.mask = 0;
  simdgroup.arrived = 0;
  bool orders = simdgroup.operation == SimdOperation::kMemoryBarrier;
  int end = simdgroup.first + simdgroup.size;
  if (simdgroup.live == simdgroup.size) {
    std::memset(state.states + simdgroup.first, kReady, std::size_t(simdgroup.size));
  } else {
    for (int i = simdgroup.first; i < end; ++i) {
      if (state.states[i] != kDone) state.states[i] = kReady;
    }
  }
  if (orders) {
    for (int i = simdgroup.first; i < end; ++i) {
      state.threads[i].clock += std::uint64_t(1) << kStampSimdShift;
    }
  }
  if (orders || simdgroup.operation == SimdOperation::kBarrier) ++counters.simdgroup_barriers;
}

// Runs kernels until nothing new is to start; the stack is used by one thread after another as long
// as none of them waits.
void fiber_main() {
  for (;;) {
    Engine::State& state = *engine;
    state.dispatch->kernel->run();
    Thread* self = current;
    Simdgroup& simdgroup = state.simdgroups[self->simdgroup];
    state.states[self->index] = kDone;
    ++state.done;
    --simdgroup.live;
    bool active_only = simdgroup.operation == SimdOperation::kShuffle ||
                       simdgroup.operation == SimdOperation::kReduce;
    if (simdgroup.arrived != 0 && simdgroup.arrived == simdgroup.live && active_only) {
      release_simdgroup(state, simdgroup);
    }
    int next = int(self->index) + 1;
    if (next < simdgroup.first + simdgroup.size && state.states[next] == kNew) {
      state.states[next] = kReady;
      current = self + 1;
      continue;
    }
    softmetal_switch_stacks(&self->stack_pointer, state.scheduler);
  }
}

// Threads at one line that came to it by different ways are not together: a GPU has them there one
// after another, each with the others inactive.
void check_ways(const Thread* self, const Thread* other, bool same, int line, const char* what) {
  if (same) return;
  fault_text(formatted("threads %u and %u came to this %s by different ways: other branches, calls "
                       "or rounds of loops",
                       other->index, self->index, what)
                 .of,
             line);
}

}  // namespace

void Engine::State::enter(Thread* thread, void** from) {
  if (states[thread->index] == kNew) {
    states[thread->index] = kReady;
    thread->stack_pointer = prepare_fiber(stacks.take(), fiber_main);
  }
  current = thread;
  softmetal_switch_stacks(from, thread->stack_pointer);
}

// Ready or new, after `after` in the order of its simdgroup; nullptr if there is none.
Thread* Engine::State::next_in_simdgroup(Thread* after) {
  const Simdgroup& simdgroup = simdgroups[after->simdgroup];
  int self = int(after->index);
  int end = simdgroup.first + simdgroup.size;
  for (int i = self + 1; i < end; ++i) {
    if (states[i] <= kReady) return &threads[i];
  }
  for (int i = simdgroup.first; i < self; ++i) {
    if (states[i] <= kReady) return &threads[i];
  }
  return nullptr;
}

// The current thread waits: another of its simdgroup runs, else the scheduler.
inline void Engine::State::leave(Thread* self, ThreadState state, int line) {
  states[self->index] = state;
  self->line = line;
  // Nearly always the neighbour.
  bool neighbour = self->lane + 1 < kSimdWidth && int(self->index) + 1 < size &&
                   states[self->index + 1] == kReady;
  Thread* next = neighbour ? self + 1 : next_in_simdgroup(self);
  if (next != nullptr) {
    enter(next, &self->stack_pointer);
  } else {
    softmetal_switch_stacks(&self->stack_pointer, scheduler);
  }
}

void threadgroup_barrier_wait(bool orders_threadgroup_memory, int line) noexcept {
  Engine::State& state = *engine;
  if (state.at_barrier == 0) state.at_barrier_first = current;
  if (state.at_barrier != 0 && state.barrier_line != line) {
    fault_text(formatted("threads of one threadgroup wait at different barriers, lines %d and %d",
                         state.barrier_line, line)
                   .of,
               line);
  }
  const Way &way = current->way, &first = state.at_barrier_first->way;
  check_ways(current, state.at_barrier_first,
             way.barrier_path == first.barrier_path && way.barrier_rounds == first.barrier_rounds,
             line, "barrier");
  state.barrier_line = line;
  if (++state.at_barrier < state.size) {
    state.leave(current, kAtBarrier, line);
    return;
  }
  state.at_barrier = 0;
  ++counters.threadgroup_barriers;
  std::memset(state.states, kReady, std::size_t(state.size));
  if (orders_threadgroup_memory) state.next_epoch();
}

uint32_t simd_wait(SimdOperation operation, int line, SimdCallback last) noexcept {
  Engine::State& state = *engine;
  Thread* self = current;
  Simdgroup& simdgroup = state.simdgroups[self->simdgroup];
  if (simdgroup.arrived != 0 && (simdgroup.operation != operation || simdgroup.line != line)) {
    fault_text(formatted("threads of one simdgroup wait at different simdgroup operations, lines "
                         "%d and %d",
                         simdgroup.line, line)
                   .of,
               line);
  }
  if (simdgroup.arrived == 0) simdgroup.came = self;
  const Way &way = self->way, &other = simdgroup.came->way;
  check_ways(self, simdgroup.came, way.path == other.path && way.rounds == other.rounds, line,
             "simdgroup operation");
  simdgroup.operation = operation;
  simdgroup.line = line;
  simdgroup.mask |= std::uint32_t(1) << self->lane;
  bool active_only = operation == SimdOperation::kShuffle || operation == SimdOperation::kReduce;
  if (++simdgroup.arrived < (active_only ? simdgroup.live : simdgroup.size)) {
    state.leave(self, kInSimdgroup, line);
    return simdgroup.last_mask;
  }
  if (last != nullptr) last(&state.threads[simdgroup.first], simdgroup.mask);
  release_simdgroup(state, simdgroup);
  return simdgroup.last_mask;
}

}  // namespace softmetal
