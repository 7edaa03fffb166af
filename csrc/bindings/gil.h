// Lets other Python threads run while it lives.
#pragma once

namespace forge::bindings {

// As py::gil_scoped_release, but safe at the interpreter's exit: a daemon thread that comes back
// then is stopped for good, as Python 3.14 does. Earlier versions end it with pthread_exit, which
// must not unwind through C++ frames.
class GilRelease {
 public:
  GilRelease();
  ~GilRelease();
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

  // Takes the GIL for a moment and runs the handlers of signals that have come. Whether one of them
  // raised: its exception is then set for when the GIL is back.
  bool handler_raised();

 private:
  void* state_;
};

// Whether Python runs signal handlers in this thread.
bool on_main_thread();

}  // namespace forge::bindings
