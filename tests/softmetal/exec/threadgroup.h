// Runs one dispatch, threadgroup after threadgroup, on the calling CPU thread.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "exec/fiber.h"
#include "softmetal/launch.h"

namespace softmetal {

struct Dispatch {
  const Kernel* kernel = nullptr;
  std::uint32_t seed = 0;  // of the order of threadgroups and simdgroups; 0: in order
  bool flushes_subnormals = false;
  Launch launch = {};
  std::size_t threadgroup_argument_bytes[kMaxBuffers] = {};
};

// How an execution failed; nothing where it did not.
struct Failure {
  std::string text;
  bool access = false;  // a memory access outside its range
  explicit operator bool() const { return !text.empty(); }
};

class Engine {
 public:
  Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;
  ~Engine();

  // The counters of the dispatch are added to `into`, on failure too.
  Failure run(const Dispatch& dispatch, Counters* into);

  struct State;

 private:
  std::unique_ptr<State> state_;
};

}  // namespace softmetal
