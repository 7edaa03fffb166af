// Every task runs exactly once, at any thread count, from many callers at once, and after fork.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <initializer_list>
#include <thread>
#include <vector>

#include "check.h"
#include "core/cpu_count.h"
#include "core/interrupt.h"
#include "core/stop.h"
#include "core/thread_pool.h"

namespace {

bool runs_each_task_once(std::int64_t tasks) {
  std::vector<std::atomic<int>> runs(static_cast<std::size_t>(tasks));
  std::atomic<bool> worker_in_range{true};
  const int threads = forge::num_threads();
  forge::parallel_for(tasks, [&](std::int64_t task, int worker) {
    runs[static_cast<std::size_t>(task)].fetch_add(1);
    if (worker < 0 || worker >= threads) worker_in_range = false;
  });
  bool once = worker_in_range;
  for (const auto& count : runs) once = once && count == 1;
  return once;
}

void test_thread_counts() {
  for (const int threads : {1, 2, 3, 8}) {
    forge::set_num_threads(threads);
    CHECK(forge::num_threads() == threads);
    for (const std::int64_t tasks : {0, 1, 2, 7, 1000}) CHECK(runs_each_task_once(tasks));
  }
  forge::set_num_threads(0);
  CHECK(forge::num_threads() == forge::usable_cpus());
}

// A worker index belongs to one running task at a time: it indexes scratch memory.
void test_worker_indices_are_exclusive() {
  forge::set_num_threads(4);
  std::vector<std::atomic<int>> inside(4);
  std::atomic<bool> exclusive{true};
  for (int round = 0; round < 200; ++round) {
    forge::parallel_for(64, [&](std::int64_t, int worker) {
      auto& count = inside[static_cast<std::size_t>(worker)];
      if (count.fetch_add(1) != 0) exclusive = false;
      count.fetch_sub(1);
    });
  }
  CHECK(exclusive);
}

// Another thread changes the count in the middle of a call: workers keep to the count it began
// with.
void test_the_count_of_a_call_stands() {
  forge::set_num_threads(2);
  const int threads = forge::num_threads();
  std::thread([] { forge::set_num_threads(8); }).join();
  std::atomic<int> highest{0};
  for (int round = 0; round < 50; ++round) {
    forge::parallel_for(1000, threads, [&](std::int64_t, int worker) {
      if (worker > highest) highest = worker;
    });
  }
  CHECK(highest < threads);
  CHECK(forge::num_threads() == 8);
}

// Called first, so that the workers start here.
void test_workers_block_all_signals_but_faults() {
  forge::set_num_threads(3);
  sigset_t own;
  pthread_sigmask(SIG_SETMASK, nullptr, &own);
  std::atomic<int> waiting{0}, wrong{0};
  const std::thread::id caller = std::this_thread::get_id();
  forge::parallel_for(3, [&](std::int64_t, int) {
    ++waiting;
    while (waiting < 3) std::this_thread::yield();  // a task a thread
    if (std::this_thread::get_id() == caller) return;
    sigset_t mask;
    pthread_sigmask(SIG_SETMASK, nullptr, &mask);
    for (const int taken : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGCHLD, SIGALRM, SIGPIPE}) {
      if (sigismember(&mask, taken) != 1) ++wrong;
    }
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) {
      if (sigismember(&mask, fault) != 0) ++wrong;
    }
  });
  CHECK(wrong == 0);
  sigset_t after;
  pthread_sigmask(SIG_SETMASK, nullptr, &after);
  for (int number = 1; number < 32; ++number) {
    CHECK(sigismember(&after, number) == sigismember(&own, number));
  }
}

void test_many_callers() {
  forge::set_num_threads(3);
  std::atomic<int> failures{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 6; ++caller) {
    callers.emplace_back([&] {
      for (int round = 0; round < 100; ++round) {
        if (!runs_each_task_once(50)) ++failures;
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK(failures == 0);
}

// Interrupted before its tasks are done, a call ends once those that run have seen it.
void test_an_interrupted_call_gives_way() {
  for (const int threads : {1, 4}) {
    forge::set_num_threads(threads);
    std::atomic<int> asked{0}, begun{0}, told{0};
    bool thrown = false;
    {
      const forge::InterruptScope scope(
          [](void* count) { return ++*static_cast<std::atomic<int>*>(count) == 2; }, &asked);
      try {
        forge::parallel_for(1000, [&](std::int64_t, int) {
          ++begun;
          while (!forge::stop_requested()) std::this_thread::yield();
          ++told;
        });
      } catch (const forge::Interrupted&) {
        thrown = true;
      }
    }
    CHECK(thrown);
    CHECK(asked == 2);
    CHECK(begun >= 1 && begun <= threads && told == begun);
    CHECK(!forge::stop_requested());
    CHECK(runs_each_task_once(100));
  }
}

void test_only_the_thread_of_the_scope_is_asked() {
  forge::set_num_threads(2);
  const forge::InterruptScope scope([](void*) { return true; }, nullptr);
  bool once = false;
  std::thread other([&] { once = runs_each_task_once(100); });
  other.join();
  CHECK(once);
}

#if !defined(__SANITIZE_THREAD__)  // which does not follow a fork from a threaded process
void test_fork() {
  forge::set_num_threads(3);
  CHECK(runs_each_task_once(100));
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    _exit(runs_each_task_once(100) ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(runs_each_task_once(100));
}
#endif

}  // namespace

int main(int argc, char** argv) {
  // qemu-user cannot start threads in a child that a threaded process forked.
  [[maybe_unused]] const bool forks = !(argc > 1 && std::strcmp(argv[1], "no-fork") == 0);
  test_workers_block_all_signals_but_faults();
  test_thread_counts();
  test_worker_indices_are_exclusive();
  test_the_count_of_a_call_stands();
  test_many_callers();
  test_an_interrupted_call_gives_way();
  test_only_the_thread_of_the_scope_is_asked();
#if !defined(__SANITIZE_THREAD__)
  if (forks) test_fork();
#endif
  return test_result();
}
