#include "runtime/control.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>

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
    {"page_bytes", 0},  // 0: the system's
    {"seed", 0},
    {"flush_subnormals", 0},
};
constexpr int kSettingCount = int(Setting::kCount);
static_assert(sizeof kSettings / sizeof kSettings[0] == kSettingCount, "a name for each setting");

constexpr const char* kEvents[] = {
    "dispatches",      "command_buffers",  "threads",          "threadgroups", "misuses",
    "no_copy_buffers", "source_libraries", "source_templates", "metallibs",    "pipelines",
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

struct CommandBufferRecord {
  std::uint64_t fmas, threadgroups;
};

int setting_index(const std::string& name) {
  for (int i = 0; i < kSettingCount; ++i) {
    if (name == kSettings[i].name) return i;
  }
  return -1;
}

struct Control {
  std::atomic<std::int64_t> settings[kSettingCount];
  std::atomic<std::int64_t> strikes[kSettingCount];
  std::atomic<std::int64_t> events[kEventCount];
  std::mutex mutex;  // of what follows
  Counters total = {};
  Counters last = {};
  std::vector<CommandBufferRecord> command_buffers;
  CompileRecord compile;

  Control() { reset(); }
  void reset() {
    for (int i = 0; i < kSettingCount; ++i) settings[i] = kSettings[i].initial;
    set_from_environment();
    for (auto& each : strikes) each = 0;
    for (auto& each : events) each = 0;
    std::lock_guard<std::mutex> lock(mutex);
    total = last = {};
    command_buffers.clear();
    compile = {};
    reset_autoreleases_without_pool();
  }
  // SOFTMETAL_SETTINGS="seed=3 page_bytes=16384": how the device is from the start of the process.
  void set_from_environment() {
    const char* given = std::getenv("SOFTMETAL_SETTINGS");
    std::istringstream words(given == nullptr ? "" : given);
    for (std::string word; words >> word;) {
      std::size_t equals = word.find('=');
      int i = setting_index(word.substr(0, equals));
      if (i < 0 || equals == std::string::npos) {
        std::fprintf(stderr, "SOFTMETAL_SETTINGS: '%s' is not name=number\n", word.c_str());
        std::abort();
      }
      settings[i] = std::atoll(word.c_str() + equals + 1);
    }
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

// "fewest_threadgroups", "most_threadgroups", "most_fmas" of a command buffer.
std::int64_t extreme(const std::string& name, const std::vector<CommandBufferRecord>& of) {
  std::uint64_t fewest = of.empty() ? 0 : of.front().threadgroups, most = 0, fmas = 0;
  for (const CommandBufferRecord& each : of) {
    fewest = std::min(fewest, each.threadgroups);
    most = std::max(most, each.threadgroups);
    fmas = std::max(fmas, each.fmas);
  }
  if (name == "fewest_threadgroups") return std::int64_t(fewest);
  if (name == "most_threadgroups") return std::int64_t(most);
  return name == "most_fmas" ? std::int64_t(fmas) : kUnknown;
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

void record_command_buffer(std::uint64_t fmas, std::uint64_t threadgroups) {
  std::lock_guard<std::mutex> lock(control().mutex);
  control().command_buffers.push_back({fmas, threadgroups});
}

}  // namespace softmetal

using softmetal::control;

// Returns 0, or -1 for an unknown name.
SOFTMETAL_EXPORT int softmetal_set(const char* name, std::int64_t value) {
  int i = softmetal::setting_index(name);
  if (i < 0) return -1;
  control().settings[i] = value;
  control().strikes[i] = 0;
  return 0;
}

// A setting; an event ("dispatches"); a counter, in total ("fmas") or of the last dispatch
// ("last.fmas"); "most_fmas" of a command buffer and the like; "live" objects, or of one class
// ("live.MTLBuffer"); "autoreleases_without_pool"; "compile.fast_math" and the like. -1: unknown.
SOFTMETAL_EXPORT std::int64_t softmetal_get(const char* name) {
  std::string asked = name;
  if (asked == "live") return softmetal::live_objects("");
  if (asked.rfind("live.", 0) == 0) return softmetal::live_objects(asked.substr(5));
  if (asked == "autoreleases_without_pool") return softmetal::autoreleases_without_pool();
  int i = softmetal::setting_index(asked);
  if (i >= 0) return control().settings[i].load();
  for (int event = 0; event < softmetal::kEventCount; ++event) {
    if (asked == softmetal::kEvents[event]) return control().events[event].load();
  }
  std::lock_guard<std::mutex> lock(control().mutex);
  std::int64_t of_buffers = softmetal::extreme(asked, control().command_buffers);
  if (of_buffers != softmetal::kUnknown) return of_buffers;
  if (asked.rfind("compile.", 0) == 0) {
    return softmetal::compile_record(asked.substr(8), control().compile);
  }
  if (asked.rfind("last.", 0) == 0) return softmetal::counter(name + 5, control().last);
  return softmetal::counter(name, control().total);
}

// Settings to their initial values, counters to 0; live objects stay counted.
SOFTMETAL_EXPORT void softmetal_reset() { control().reset(); }
