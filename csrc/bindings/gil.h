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

 private:
  void* state_;
};

}  // namespace forge::bindings
