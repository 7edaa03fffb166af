// Working memory of a call, kept by the process for the next one: fresh pages cost more to touch
// than a small attention call takes.
#pragma once

#include <cstddef>

namespace forge::cpu {

class Scratch {
 public:
  // At least that many bytes, aligned to a cache line, content unspecified. Throws std::bad_alloc.
  explicit Scratch(std::size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  char* data() const;

 private:
  struct Block;
  Block* block_;
};

}  // namespace forge::cpu
