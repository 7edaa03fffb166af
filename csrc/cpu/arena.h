// Working memory handed out front to back, each piece on a cache line. With a null base it only
// counts.
#pragma once

#include "shared/index_range.h"

namespace forge::cpu {

class Arena {
 public:
  FORGE_MEMBER explicit Arena(char* base) : base_(base) {}

  template <typename T>
  FORGE_MEMBER T* take(Int64 count) {
    T* piece = reinterpret_cast<T*>(base_ + used_);
    used_ += round_up(count * static_cast<Int64>(sizeof(T)), 64);
    return piece;
  }
  FORGE_MEMBER Int64 used() const { return used_; }

 private:
  char* base_;
  Int64 used_ = 0;
};

}  // namespace forge::cpu
