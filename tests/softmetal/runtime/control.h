// What a test can tell the device and ask it, by name: settings, faults, counters.
#pragma once

#include <cstdint>

#include "softmetal/launch.h"

namespace softmetal {

enum class Setting {
  // Faults: not 0 is on.
  kNoDevice,
  kNilQueue,
  kNilCommandBuffer,
  kNilEncoder,
  kNilBuffer,
  kNilNoCopyBuffer,
  kBadSource,
  kBadMetallib,
  kBadFunction,
  kBadPipeline,
  kCommandBufferError,  // the CommandBufferError code, 2 being a timeout
  kDeviceLost,
  kNth,  // a fault strikes only the n-th time that it could; 0: every time
  // Properties of the device.
  kReadOnly,    // every wrapped page counts as not writeable
  kMaxThreads,  // maxTotalThreadsPerThreadgroup of pipelines
  kMaxBufferLength,
  kMacosMajor,
  kPageBytes,
  // What Metal leaves open.
  kSeed,  // of orders and roundings; 0: the plainest
  kFlushSubnormals,
  kCount
};

std::int64_t setting(Setting which);
// Whether a fault strikes now; counts the times it could.
bool fault_strikes(Setting which);

enum class Event {
  kDispatches,
  kCommandBuffers,
  kThreads,
  kThreadgroups,
  kMisuses,  // uses of the interface that real Metal forbids
  kNoCopyBuffers,
  kSourceLibraries,
  kSourceTemplates,  // kernels made of templates in them
  kMetallibs,
  kPipelines,
  kCount
};
void count(Event event, std::int64_t by = 1);

// What the last library was compiled with.
struct CompileRecord {
  std::int64_t language_version = 0;
  std::int64_t fast_math = -1;
  std::int64_t math_mode = -1;
  std::int64_t math_functions = -1;
};
void record_compile(const CompileRecord& record);

// Adds a dispatch's counters to the totals, and keeps them as the last.
void record_dispatch(const Counters& of);
// Of one that was executed, in their order.
void record_command_buffer(std::uint64_t fmas, std::uint64_t threadgroups);

}  // namespace softmetal
