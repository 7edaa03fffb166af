// Runs one kernel of a text that was translated and compiled while a test runs (live.py): for hosts
// that encode dispatches themselves, on memory that the test owns.
#include <algorithm>
#include <cstring>
#include <string>

#include "exec/shadow.h"
#include "exec/threadgroup.h"

namespace {

using namespace softmetal;

struct LiveArgument {
  const char* data;
  std::uint64_t bytes;
  std::int32_t is_memory;  // 0: bytes of the host's, given by value
};

std::string bound(const Argument& argument, const LiveArgument* given, int count, Launch* table) {
  const std::string name = std::string("argument '") + argument.name + "'";
  if (argument.kind == ArgumentKind::kBuiltin) return "";
  if (argument.kind != ArgumentKind::kBuffer) return name + " is no buffer";
  if (argument.index >= count) return name + ": nothing is bound at its index";
  const LiveArgument& from = given[argument.index];
  if (from.bytes < argument.least_bytes) {
    return name + ": " + std::to_string(from.bytes) + " bytes are bound, the shader reads " +
           std::to_string(argument.least_bytes);
  }
  if (reinterpret_cast<std::uintptr_t>(from.data) % argument.alignment != 0) {
    return name + ": not aligned to " + std::to_string(argument.alignment);
  }
  if (from.is_memory == 0 && argument.stores) return name + " is written, and was given by value";
  const char* end = from.data + from.bytes;
  table->buffers[argument.index] = {from.data,
                                    end,
                                    from.data,
                                    from.is_memory != 0 ? end : from.data,
                                    from.data,
                                    argument.name,
                                    from.is_memory != 0 ? "memory" : "bytes",
                                    nullptr};
  return "";
}

std::string run(const Program& program, const char* name, const LiveArgument* given, int count,
                const std::uint32_t* threads, const std::uint32_t* group, std::uint32_t seed) {
  const Kernel* kernel =
      std::find_if(program.kernels, program.kernels + program.kernel_count,
                   [&](const Kernel& of) { return std::strcmp(of.name, name) == 0; });
  if (kernel == program.kernels + program.kernel_count) return "the text has no such kernel";
  if (kernel->constant_count > 0) return "the kernel reads function constants, which nobody sets";
  const std::uint32_t all = group[0] * group[1] * group[2];
  const auto most =
      static_cast<std::uint32_t>(kernel->max_threads > 0 ? kernel->max_threads : kMaxThreads);
  if (all == 0 || all > most) {
    return "a threadgroup of " + std::to_string(all) + " threads, the kernel allows " +
           std::to_string(most);
  }
  Dispatch dispatch;
  dispatch.kernel = kernel;
  dispatch.seed = seed;
  Launch& table = dispatch.launch;
  table.freedom = {seed * 0x85ebca6bu, seed % kProductOrders};
  table.threads_per_grid = {threads[0], threads[1], threads[2]};
  table.threads_per_threadgroup = {group[0], group[1], group[2]};
  const auto groups = [&](int axis) { return (threads[axis] + group[axis] - 1) / group[axis]; };
  table.threadgroups_per_grid = {groups(0), groups(1), groups(2)};
  if (groups(0) * groups(1) * groups(2) == 0) return "an empty grid";
  for (int i = 0; i < kernel->argument_count; ++i) {
    const std::string wrong = bound(kernel->arguments[i], given, count, &table);
    if (!wrong.empty()) return wrong;
  }
  Engine engine;
  Counters counters = {};
  return engine.run(dispatch, &counters).text;
}

}  // namespace

// What went wrong, "" if nothing did; good until the next call.
extern "C" __attribute__((visibility("default"))) const char* softmetal_run_kernel(
    const softmetal::Program* program, const char* name, const LiveArgument* given, int count,
    const std::uint32_t* threads, const std::uint32_t* group, std::uint32_t seed) {
  static std::string failure;
  failure = run(*program, name, given, count, threads, group, seed);
  return failure.c_str();
}
