// What a kernel did wrong, in words.
#include <cstdarg>
#include <cstdio>
#include <string>

#include "exec/state.h"

namespace softmetal {

Text formatted(const char* format, ...) {
  Text text;
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text.of, sizeof text.of, format, arguments);
  va_end(arguments);
  return text;
}

void Engine::State::fail(bool access, const char* text) {
  if (failure) return;
  failure.access = access;
  failure.text = text;
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

void fault_access(const Binding* binding, const void* address, size_t size, size_t alignment,
                  bool store) noexcept {
  Engine::State& state = *engine;
  auto at = reinterpret_cast<std::uintptr_t>(address);
  auto base = reinterpret_cast<std::uintptr_t>(binding->base);
  bool inside = !(at < reinterpret_cast<std::uintptr_t>(binding->begin) ||
                  at + size > reinterpret_cast<std::uintptr_t>(binding->end));
  auto offset = static_cast<long long>(static_cast<std::intptr_t>(at - base));
  long long index = offset / static_cast<long long>(size);
  Position thread = current->in_grid;
  const char* what = !inside               ? "outside the range"
                     : at % alignment != 0 ? "at an address that is not aligned"
                                           : "to memory that is not writeable";
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

void fault_device_race(const Binding* binding, const void* address, uint32_t other, bool store,
                       bool other_store) noexcept {
  Text text =
      other == kOfManyGroups ? Text{"other threadgroups"} : formatted("threadgroup %u", other - 1);
  fault_text(formatted("device memory of argument '%s', byte offset %td: threadgroup %u %s what %s "
                       "%s in the same dispatch",
                       binding->argument, static_cast<const char*>(address) - binding->base,
                       group.number - 1, store ? "stores" : "loads", text.of,
                       other_store ? "stored" : "loaded")
                 .of,
             0);
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
                      threads[i].line)
                .of;
    break;
  }
  fail(false, text.c_str());
}

}  // namespace softmetal
