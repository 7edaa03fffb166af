// Where a thread is in the control flow, so that threads which come to one line by different ways
// are told apart. The translator puts these into what holds simdgroup operations or barriers
// (branches.py); nothing else leaves a trace.
#pragma once

#include "softmetal/launch.h"

namespace softmetal {

// A function, an `if`, an `else` or a loop, in whose body the thread is as long as this lives.
struct Branch {
  Thread* self;
  Way before;
  Branch(uint32_t number, bool has_barrier) : self(current), before(self->way) {
    self->way.path = before.path * 0x9e3779b1u + number;
    if (has_barrier) self->way.barrier_path = before.barrier_path * 0x9e3779b1u + number;
  }
  Branch(const Branch&) = delete;
  ~Branch() {
    self->way.path = before.path;
    self->way.barrier_path = before.barrier_path;
  }
};

// One round of a loop, or one call of a function. They are counted to the end of the kernel:
// threads that went round unequally often, or left a function early, do not meet in the next.
struct Round : Branch {
  Round(uint32_t number, bool has_barrier) : Branch(number, has_barrier) {
    ++self->way.rounds;
    if (has_barrier) ++self->way.barrier_rounds;
  }
};

}  // namespace softmetal
