// C functions for benchmarks/probe.py. Each runs one loop on several threads at once, one pinned to
// each CPU the process may use, for about the time asked, and returns the sum of the threads'
// rates.
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

#include "core/cpu_target.h"
#include "probe_kernels.h"

#define FORGE_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

const forge::probe::Kernels& kernels() {
  switch (forge::usable_cpu_targets().front()) {
#if defined(__x86_64__)
    case forge::CpuTarget::kAvx512:
      return forge::probe::avx512::kKernels;
    case forge::CpuTarget::kAvx2:
      return forge::probe::avx2::kKernels;
#elif defined(__aarch64__)
    case forge::CpuTarget::kNeon:
      return forge::probe::neon::kKernels;
#endif
    default:
      return forge::probe::baseline::kKernels;
  }
}

#if defined(__linux__)
// Puts the calling thread on the n-th of the CPUs that the process's main thread started with.
class Affinity {
 public:
  Affinity() { sched_getaffinity(0, sizeof old_, &old_); }
  ~Affinity() { sched_setaffinity(0, sizeof old_, &old_); }
  static void pin(int n, const int* cpus, int count) {
    if (count < 1) return;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpus[n % count], &one);
    sched_setaffinity(0, sizeof one, &one);
  }

 private:
  cpu_set_t old_;
};
#else
struct Affinity {
  static void pin(int, const int*, int) {}
};
#endif

struct Place {
  int threads;
  const int* cpus;  // CPU numbers to pin to, in order
  int count;
};

// work(thread) returns what it did in some 100 us to 10 ms; repeated until the time is over.
template <typename Work>
double rate(const Place& place, double seconds, const Work& work) {
  [[maybe_unused]] const Affinity restored_afterwards;
  std::vector<double> rates(static_cast<std::size_t>(place.threads), 0.0);
  std::atomic<int> ready{0};
  std::atomic<bool> go{false};
  const auto run = [&](int thread) {
    Affinity::pin(thread, place.cpus, place.count);
    ready.fetch_add(1);
    while (!go.load(std::memory_order_acquire)) {
    }
    const Clock::time_point start = Clock::now();
    double done = 0, elapsed = 0;
    while (elapsed < seconds) {
      done += work(thread);
      elapsed = seconds_since(start);
    }
    rates[static_cast<std::size_t>(thread)] = done / elapsed;
  };
  std::vector<std::thread> others;
  for (int thread = 1; thread < place.threads; ++thread) others.emplace_back(run, thread);
  while (ready.load() < place.threads - 1) std::this_thread::yield();
  go.store(true, std::memory_order_release);
  run(0);
  for (std::thread& other : others) other.join();
  double sum = 0;
  for (const double value : rates) sum += value;
  return sum;
}

std::atomic<float> sink_of_all{0};  // keeps the loops from being optimized away

}  // namespace

FORGE_EXPORT const char* forge_probe_target() {
  return forge::cpu_target_name(forge::usable_cpu_targets().front());
}

// Floating-point operations a second.
FORGE_EXPORT double forge_probe_flops(int threads, const int* cpus, int count, double seconds) {
  return rate({threads, cpus, count}, seconds, [](int) {
    float sink;
    const double operations = kernels().multiply_add(10000, &sink);
    sink_of_all.store(sink, std::memory_order_relaxed);
    return operations;
  });
}

// Bytes a second, each thread reading its own share of `bytes`, which should exceed the caches.
FORGE_EXPORT double forge_probe_read(int threads, const int* cpus, int count, double seconds,
                                     std::int64_t bytes) {
  constexpr std::int64_t kChunk = 1 << 20;  // bytes read between two looks at the clock
  const std::int64_t share = bytes / threads / kChunk * kChunk;
  const std::size_t size = static_cast<std::size_t>(share) * static_cast<std::size_t>(threads);
  const std::unique_ptr<void, void (*)(void*)> memory(std::aligned_alloc(4096, size), std::free);
  if (share < 1 || !memory) return 0;
  float* floats = static_cast<float*>(memory.get());
  for (std::size_t i = 0; i < size / sizeof(float); ++i) floats[i] = 1;
  std::vector<std::int64_t> at(static_cast<std::size_t>(threads), 0);
  return rate({threads, cpus, count}, seconds, [&](int thread) {
    std::int64_t& offset = at[static_cast<std::size_t>(thread)];
    const float* data = floats + (thread * share + offset) / 4;
    sink_of_all.store(kernels().read(data, kChunk / 4), std::memory_order_relaxed);
    offset = (offset + kChunk) % share;
    return static_cast<double>(kChunk);
  });
}
