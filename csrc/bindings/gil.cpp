// Compiled without exceptions: pthread_cleanup_push is then POSIX's own, a jump and no destructor,
// and catches pthread_exit before the first C++ frame.
#include "bindings/gil.h"

#include <Python.h>
#include <pthread.h>
#include <unistd.h>

#if defined(__linux__)
#include <sys/syscall.h>
#endif

namespace forge::bindings {
namespace {

void wait_for_the_end(void*) {
  for (;;) pause();
}

}  // namespace

GilRelease::GilRelease() : state_(PyEval_SaveThread()) {}

GilRelease::~GilRelease() {
  pthread_cleanup_push(wait_for_the_end, nullptr);
  PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
  pthread_cleanup_pop(0);
}

bool GilRelease::handler_raised() {
  PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
  const bool raised = PyErr_CheckSignals() != 0;
  state_ = PyEval_SaveThread();
  return raised;
}

bool on_main_thread() {
#if defined(__APPLE__)
  return pthread_main_np() != 0;
#elif defined(__linux__)
  return getpid() == static_cast<pid_t>(syscall(SYS_gettid));
#else
  return false;
#endif
}

}  // namespace forge::bindings
