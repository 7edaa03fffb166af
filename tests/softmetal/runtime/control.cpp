#include "runtime/control.h"

#include <atomic>
#include <cstring>
#include <mutex>
#include <string>

#include "runtime/object.h"

#define SOFTMETAL_EXPORT extern "C" __attribute__((visibility("default")))

namespace softmetal {

namespace {

struct SettingInfo {
  const char* name;
  std::int64_t initial;
};
constexpr SettingInfo kSettings[] = {
    {"no_device", 0},
    {"nil_queue", 0},
    {"nil_command_buffer", 0},
    {"nil_encoder", 0},
    {"nil_buffer", 0},
    {"nil_no_copy_buffer", 0},
    {"bad_source", 0},
    {"bad_metallib", 0},
    {"bad_function", 0},
    {"bad_pipeline", 0},
    {"command_buffer_error", 0},
    {"device_lost", 0},
    {"nth", 0},
    {"read_only", 0},
    {"max_threads", 1024},
    {"max_buffer_length", std::int64_t(1) << 36},
    {"macos_major", 15},
};
constexpr int kSettingCount = int(Setting::kCount);
static_assert(sizeof kSettings / sizeof kSettings[0] == kSettingCount, "a name for each setting");

constexpr const char* kEvents[] = {
    "dispatches",      "command_buffers",  "threads",   "threadgroups", "misuses",
    "no_copy_buffers", "source_libraries", "metallibs", "pipelines",
};
constexpr int kEventCount = int(Event::kCount);
static_assert(sizeof kEvents / sizeof kEvents[0] == kEventCount, "a name for each event");

struct CounterInfo {
  const char* name;
  std::uint64_t Counters::* member;
};
constexpr CounterInfo kCounters[] = {
    {"device_bytes_loaded", &Counters::device_bytes_loaded},
    {"device_bytes_stored", &Counters::device_bytes_stored},
    {"threadgroup_bytes_loaded", &Counters::threadgroup_bytes_loaded},
    {"threadgroup_bytes_stored", &Counters::threadgroup_bytes_stored},
    {"fmas", &Counters::fmas},
    {"matrix_products", &Counters::matrix_products},
    {"exps", &Counters::exps},
    {"threadgroup_barriers", &Counters::threadgroup_barriers},
    {"simdgroup_barriers", &Counters::simdgroup_barriers},
};
static_assert(sizeof(Counters) == sizeof(std::uint64_t) * (sizeof kCounters / sizeof kCounters[0]),
              "a name for each counter");

struct Control {
  std::atomic<std::int64_t> settings[kSettingCount];
  std::atomic<std::int64_t> strikes[kSettingCount];
  std::atomic<std::int64_t> events[kEventCount];
  std::mutex mutex;  // of what follows
  Counters total = {};
  Counters last = {};
  std::uint64_t most_fmas = 0;  // of a command buffer
  CompileRecord compile;

  Control() { reset(); }
  void reset() {
    for (int i = 0; i < kSettingCount; ++i) settings[i] = kSettings[i].initial;
    for (auto& each : strikes) each = 0;
    for (auto& each : events) each = 0;
    std::lock_guard<std::mutex> lock(mutex);
    total = last = {};
    most_fmas = 0;
    compile = {};
    reset_autoreleases_without_pool();
  }
};

Control& control() {
  static Control& only = *new Control;
  return only;
}

constexpr std::int64_t kUnknown = -1;

std::int64_t counter(const char* name, const Counters& of) {
  for (const CounterInfo& info : kCounters) {
    if (std::strcmp(name, info.name) == 0) return std::int64_t(of.*info.member);
  }
  return kUnknown;
}

std::int64_t compile_record(const std::string& name, const CompileRecord& record) {
  if (name == "language_version") return record.language_version;
  if (name == "fast_math") return record.fast_math;
  if (name == "math_mode") return record.math_mode;
  if (name == "math_functions") return record.math_functions;
  return kUnknown;
}

}  // namespace

std::int64_t setting(Setting which) { return control().settings[int(which)].load(); }

bool fault_strikes(Setting which) {
  if (setting(which) == 0) return false;
  std::int64_t time = ++control().strikes[int(which)];
  std::int64_t nth = setting(Setting::kNth);
  return nth == 0 || nth == time;
}

void count(Event event, std::int64_t by) { control().events[int(event)] += by; }

void record_compile(const CompileRecord& record) {
  std::lock_guard<std::mutex> lock(control().mutex);
  control().compile = record;
}

void record_dispatch(const Counters& of) {
  std::lock_guard<std::mutex> lock(control().mutex);
  control().last = of;
  for (const CounterInfo& info : kCounters) control().total.*info.member += of.*info.member;
}

void record_command_buffer(std::uint64_t fmas) {
  std::lock_guard<std::mutex> lock(control().mutex);
  if (fmas > control().most_fmas) control().most_fmas = fmas;
}

}  // namespace softmetal

using softmetal::control;

// Returns 0, or -1 for an unknown name.
SOFTMETAL_EXPORT int softmetal_set(const char* name, std::int64_t value) {
  for (int i = 0; i < softmetal::kSettingCount; ++i) {
    if (std::strcmp(name, softmetal::kSettings[i].name) != 0) continue;
    control().settings[i] = value;
    control().strikes[i] = 0;
    return 0;
  }
  return -1;
}

// A setting; an event ("dispatches"); a counter, in total ("fmas") or of the last dispatch
// ("last.fmas"); "most_fmas" of a command buffer; "live" objects, or of one class
// ("live.MTLBuffer"); "autoreleases_without_pool"; "compile.fast_math" and the like. -1: unknown.
SOFTMETAL_EXPORT std::int64_t softmetal_get(const char* name) {
  std::string asked = name;
  if (asked == "live") return softmetal::live_objects("");
  if (asked.rfind("live.", 0) == 0) return softmetal::live_objects(asked.substr(5));
  if (asked == "autoreleases_without_pool") return softmetal::autoreleases_without_pool();
  for (int i = 0; i < softmetal::kSettingCount; ++i) {
    if (asked == softmetal::kSettings[i].name) return control().settings[i].load();
  }
  for (int i = 0; i < softmetal::kEventCount; ++i) {
    if (asked == softmetal::kEvents[i]) return control().events[i].load();
  }
  std::lock_guard<std::mutex> lock(control().mutex);
  if (asked == "most_fmas") return std::int64_t(control().most_fmas);
  if (asked.rfind("compile.", 0) == 0) {
    return softmetal::compile_record(asked.substr(8), control().compile);
  }
  if (asked.rfind("last.", 0) == 0) return softmetal::counter(name + 5, control().last);
  return softmetal::counter(name, control().total);
}

// Settings to their initial values, counters to 0; live objects stay counted.
SOFTMETAL_EXPORT void softmetal_reset() { control().reset(); }
