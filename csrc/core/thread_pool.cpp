#include "core/thread_pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/cpu_count.h"
#include "core/interrupt.h"
#include "core/stop.h"

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#include <signal.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace forge {
namespace {

// Workers spin this long for the next region before they sleep: waking a sleeping thread costs tens
// of microseconds, more than a small attention call takes.
constexpr auto kSpinTime = std::chrono::microseconds(200);

void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// A thread starts with the signals blocked that its creator blocks. No signal to the process is a
// worker's to take: the program's own threads may wait for it. Those that a fault raises must reach
// the thread that is at fault.
class SignalsBlocked {
 public:
#if defined(__unix__) || defined(__APPLE__)
  SignalsBlocked() {
    sigset_t set;
    sigfillset(&set);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) {
      sigdelset(&set, fault);
    }
    pthread_sigmask(SIG_SETMASK, &set, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
#endif
};

constexpr std::size_t kLineBytes = 64;  // of the cache: what one thread writes and another reads

// One parallel region: tasks are claimed off a shared counter, first to last. Once stopped, tasks
// return early and no more are claimed.
struct Region {
  TaskFunction function;
  void* context;
  std::int64_t tasks;
  std::atomic<bool> stopped{false};
  alignas(kLineBytes) std::atomic<std::int64_t> next{0};  // apart from what is only read

  void run(int worker);

  // Only the thread of the call can be interrupted; the others see what it found.
  bool should_stop() {
    if (stopped.load(std::memory_order_relaxed)) return true;
    if (!interrupt_asked()) return false;
    stopped.store(true, std::memory_order_relaxed);
    return true;
  }
};

thread_local Region* current_region = nullptr;

void Region::run(int worker) {
  Region* const outer = current_region;
  current_region = this;
  while (!should_stop()) {
    const std::int64_t task = next.fetch_add(1, std::memory_order_relaxed);
    if (task >= tasks) break;
    function(context, task, worker);
  }
  current_region = outer;
}

// A worker and its mailbox. The caller offers a region; the worker takes it, or the caller takes
// the offer back when nothing is left to do, so that a late wake-up costs nothing.
class alignas(kLineBytes) Worker {
 public:
  // cpu: where to stay, or -1: wherever the system puts it.
  explicit Worker(int cpu) : cpu_(cpu), thread_([this] { work(); }) { thread_.detach(); }

  int cpu() const { return cpu_; }

  void offer(Region* region, int index) {
    region_ = region;
    index_ = index;
    state_.store(State::kOffered, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst)) {
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_one();
    }
  }

  void retract_or_wait(Region& region) {
    State offered = State::kOffered;
    if (state_.compare_exchange_strong(offered, State::kIdle, std::memory_order_acq_rel)) return;
    for (int spins = 0; state_.load(std::memory_order_acquire) != State::kIdle; ++spins) {
      if (spins < 20000) {
        pause_cpu();
      } else {
        region.should_stop();  // passes it on to the worker
        std::this_thread::yield();
      }
    }
  }

 private:
  enum class State { kIdle, kOffered, kRunning };

  void work() {
#if defined(__linux__)
    if (cpu_ >= 0) {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(cpu_, &set);
      sched_setaffinity(0, sizeof set, &set);
    }
#endif
    for (;;) {
      wait_for_offer();
      State offered = State::kOffered;
      if (state_.compare_exchange_strong(offered, State::kRunning, std::memory_order_acq_rel)) {
        region_->run(index_);
        state_.store(State::kIdle, std::memory_order_release);
      }
    }
  }

  bool offered() const { return state_.load(std::memory_order_seq_cst) == State::kOffered; }

  void wait_for_offer() {
    const auto deadline = std::chrono::steady_clock::now() + kSpinTime;
    for (int spins = 1; !offered(); ++spins) {
      pause_cpu();
      if (spins % 64 == 0 && std::chrono::steady_clock::now() > deadline) {
        std::unique_lock<std::mutex> lock(mutex_);
        asleep_.store(true, std::memory_order_seq_cst);
        wake_.wait(lock, [this] { return offered(); });
        asleep_.store(false, std::memory_order_seq_cst);
      }
    }
  }

  const int cpu_;
  Region* region_ = nullptr;
  int index_ = 0;
  std::atomic<State> state_{State::kIdle};
  std::atomic<bool> asleep_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::thread thread_;  // last: starts when the rest is ready
};

class Pool {
 public:
  Pool() : cpus_(allowed_cpus()) {}

  std::mutex& region_lock() { return region_lock_; }

  // The caller holds region_lock.
  void run(Region& region, int threads) {
    start_workers(threads);
    const int cpu = current_cpu();
    std::vector<Worker*>& helpers = helpers_;
    helpers.clear();
    // Workers on other CPUs first: one on the caller's CPU could only take turns with it.
    for (const bool other_cpu : {true, false}) {
      for (const auto& worker : workers_) {
        if ((worker->cpu() != cpu) == other_cpu && static_cast<int>(helpers.size()) < threads - 1) {
          helpers.push_back(worker.get());
          worker->offer(&region, static_cast<int>(helpers.size()));
        }
      }
    }
    region.run(0);
    for (Worker* worker : helpers) worker->retract_or_wait(region);
  }

 private:
  // Where a call uses every CPU of the process, there is a worker pinned to each: some schedulers
  // leave a woken thread on its waker's CPU for milliseconds, and the one on the caller's CPU is
  // left out. A call that uses fewer must not choose which: other processes would choose the same.
  void start_workers(int threads) {
    const bool all_cpus = threads == static_cast<int>(cpus_.size());
    const std::size_t wanted = static_cast<std::size_t>(all_cpus ? threads : threads - 1);
    workers_.reserve(wanted);  // nothing below may throw once a worker has started
    helpers_.reserve(wanted);
    if (workers_.size() >= wanted) return;
    const SignalsBlocked blocked;
    try {
      while (workers_.size() < wanted) {
        workers_.push_back(std::make_unique<Worker>(all_cpus ? cpus_[workers_.size()] : -1));
      }
    } catch (const std::exception&) {
      // The system grants no more threads: the region runs on those there are.
    }
  }

  static int current_cpu() {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
  }

  const std::vector<int> cpus_;
  std::vector<std::unique_ptr<Worker>> workers_;  // live as long as the process
  std::vector<Worker*> helpers_;                  // of the current region
  std::mutex region_lock_;
};

// The pool of this process. Never destroyed: workers may be inside it at exit, and a forked child,
// which has no workers, leaks its parent's and starts its own.
std::atomic<Pool*> process_pool{nullptr};
std::atomic<int> thread_count{0};

Pool& current_pool() {
  Pool* existing = process_pool.load(std::memory_order_acquire);
  if (existing != nullptr) return *existing;
  Pool* fresh = new Pool;
  if (!process_pool.compare_exchange_strong(existing, fresh, std::memory_order_acq_rel)) {
    delete fresh;  // holds no threads yet
    return *existing;
  }
#if defined(__unix__) || defined(__APPLE__)
  static const int registered = pthread_atfork(
      nullptr, nullptr, [] { process_pool.store(nullptr, std::memory_order_release); });
  (void)registered;
#endif
  return *fresh;
}

}  // namespace

int num_threads() {
  const int threads = thread_count.load(std::memory_order_relaxed);
  return threads > 0 ? threads : usable_cpus();
}

void set_num_threads(int threads) {
  thread_count.store(std::clamp(threads, 0, kMaxThreads), std::memory_order_relaxed);
}

bool stop_requested() { return current_region != nullptr && current_region->should_stop(); }

void run_tasks(std::int64_t tasks, int most_threads, TaskFunction function, void* context) {
  Region region{function, context, tasks};
  const int threads = static_cast<int>(std::min<std::int64_t>(most_threads, tasks));
  std::unique_lock<std::mutex> lock;
  if (threads > 1)
    lock = std::unique_lock<std::mutex>(current_pool().region_lock(), std::try_to_lock);
  if (lock.owns_lock()) {
    current_pool().run(region, threads);
  } else {
    region.run(0);
  }
  if (region.stopped.load(std::memory_order_relaxed)) throw Interrupted();
}

}  // namespace forge
