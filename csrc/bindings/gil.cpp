// Compiled without exceptions: pthread_cleanup_push is then POSIX's own, a jump and no destructor,
// and catches pthread_exit before the first C++ frame.
#include "bindings/gil.h"

#include <Python.h>
#include <pthread.h>
#include <unistd.h>

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

}  // namespace forge::bindings
