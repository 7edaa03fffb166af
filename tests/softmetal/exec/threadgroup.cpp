#include "exec/threadgroup.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "exec/shadow.h"
#include "exec/state.h"
#include "exec/subnormals.h"

namespace softmetal {

SOFTMETAL_THREAD_LOCAL Counters counters = {};
SOFTMETAL_THREAD_LOCAL const Launch* launch = nullptr;
SOFTMETAL_THREAD_LOCAL Thread* current = nullptr;
SOFTMETAL_THREAD_LOCAL ThreadgroupState group = {};
SOFTMETAL_THREAD_LOCAL Engine::State* engine = nullptr;

void Engine::State::next_epoch() {
  clock += std::uint64_t(1) << kStampGroupShift;
  if (clock == 0) {  // wrapped around: what was remembered would look new
    std::memset(writes, 0, sizeof writes);
    std::memset(reads, 0, sizeof reads);
    clock = std::uint64_t(1) << kStampGroupShift;
  }
  for (int i = 0; i < size; ++i) threads[i].clock = clock | std::uint64_t(i);
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
  binding = {begin, begin + size, begin, begin + size, begin, name, "threadgroup memory", nullptr};
  state.memory_used = start + size;
  state.array_known[id] = true;
  return &binding;
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
        begin,  begin + bytes, begin, begin + bytes, begin, binding.argument, "threadgroup memory",
        nullptr};
    argument_bytes += (bytes + 15) / 16 * 16;
  }
}

// xorshift64*
std::uint32_t Engine::State::random(std::uint32_t below) {
  random_state ^= random_state >> 12;
  random_state ^= random_state << 25;
  random_state ^= random_state >> 27;
  return std::uint32_t((random_state * 0x2545f4914f6cdd1du) >> 32) % below;
}

std::vector<std::uint32_t> Engine::State::order_of(std::uint32_t count) {
  std::vector<std::uint32_t> order(count);
  std::iota(order.begin(), order.end(), 0u);
  for (std::uint32_t left = count; dispatch->seed != 0 && left > 1; --left) {
    std::swap(order[left - 1], order[random(left)]);
  }
  return order;
}

void Engine::State::start_group(std::uint32_t number) {
  const Position groups = launch.threadgroups_per_grid;
  const Position at = {number % groups.x, number / groups.x % groups.y,
                       number / groups.x / groups.y};
  group.number = number + 1;
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
        thread.way = {};
      }
    }
  }
  std::memset(states, kNew, std::size_t(size));
  for (int i = 0; i < count; ++i) {
    int first = i * kSimdWidth;
    int in_group = std::min(kSimdWidth, size - first);
    simdgroups[i] = {first, in_group, in_group, 0, 0, 0, SimdOperation::kBarrier, 0, nullptr};
  }
  // NaN, so that reading what nobody wrote shows.
  std::memset(memory, 0xff, std::max(memory_used, argument_bytes));
  memory_used = argument_bytes;
  std::memset(array_known, 0, sizeof array_known);
  next_epoch();
}

void Engine::State::run_group() {
  int from = 0;
  const auto count = std::uint32_t(size + kSimdWidth - 1) / kSimdWidth;
  while (done < size && !failure) {
    int next = -1;
    if (dispatch->seed != 0) from = int(random(count)) * kSimdWidth;
    for (int step = 0; step < size && next < 0; ++step) {
      int i = from + step < size ? from + step : from + step - size;
      if (states[i] <= kReady) next = i;
    }
    if (next < 0) {
      diagnose_stuck();
      break;
    }
    from = next;
    enter(&threads[next], &scheduler);
  }
  stacks.give_all_back();
}

Failure Engine::State::run(const Dispatch& given) {
  dispatch = &given;
  failure = Failure();
  place_arguments();
  softmetal::launch = &launch;
  group = {memory, writes, reads, threads, 0};
  random_state = dispatch->seed * std::uint64_t(0x9e3779b97f4a7c15u) + 1;
  const Shadows shadows(*given.kernel, &launch);
  const FlushSubnormals flush(given.flushes_subnormals);
  const Position groups = launch.threadgroups_per_grid;
  for (std::uint32_t number : order_of(groups.x * groups.y * groups.z)) {
    start_group(number);
    run_group();
    if (failure) break;
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
