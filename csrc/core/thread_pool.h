// One pool of worker threads for the whole process. What a task computes must not depend on which
// thread runs it; then results do not depend on the number of threads.
#pragma once

#include <cstdint>
#include <type_traits>

namespace forge {

constexpr int kMaxThreads = 1024;

// Threads a parallel_for uses, the caller included. 0 in set_num_threads means usable_cpus().
int num_threads();
void set_num_threads(int threads);

using TaskFunction = void (*)(void* context, std::int64_t task, int worker);

// Runs function(context, task, worker) for every task in [0, tasks), in ascending order of start,
// on up to most_threads threads; returns when all are done. worker is in [0, most_threads) and
// unique among tasks that run at the same time: an index for scratch memory. Tasks must not throw.
// When another thread is already inside, the call runs all its tasks on its own thread. Throws
// Interrupted (core/interrupt.h) when all are done or given up, where the calling thread was asked
// to give way.
void run_tasks(std::int64_t tasks, int most_threads, TaskFunction function, void* context);

// With scratch memory for a number of threads that was asked for before: num_threads() may have
// changed.
template <typename Body>
void parallel_for(std::int64_t tasks, int most_threads, Body&& body) {
  run_tasks(
      tasks, most_threads,
      [](void* context, std::int64_t task, int worker) {
        (*static_cast<std::remove_reference_t<Body>*>(context))(task, worker);
      },
      &body);
}

template <typename Body>
void parallel_for(std::int64_t tasks, Body&& body) {
  parallel_for(tasks, num_threads(), body);
}

}  // namespace forge
