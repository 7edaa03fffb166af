// Which block of the backward a worker takes next.
#pragma once

#include <mutex>
#include <vector>

#include "shared/index_range.h"

namespace forge::cpu {

// Who works on which block next. A worker stays with its kv head, whose keys and gradients then
// stay in its cache, and takes a fresh one when it is done; with none left it joins the head that
// has most left. The blocks of a head always go out last rows first, which see most under a causal
// mask. Only when a block is worked on depends on this, not what it adds to what.
class BlockQueue {
 public:
  struct Item {
    Int64 group;
    Int64 block;
  };

  BlockQueue(Int64 groups, Int64 blocks, std::size_t workers)
      : groups_(groups), left_(static_cast<std::size_t>(groups), blocks), at_(workers, -1) {}

  // There must be one left.
  Item take(int worker) {
    std::lock_guard<std::mutex> lock(mutex_);
    Int64& group = at_[static_cast<std::size_t>(worker)];
    if (group < 0 || left(group) == 0) group = fresh_ < groups_ ? fresh_++ : most_left();
    return {group, --left(group)};
  }

 private:
  Int64& left(Int64 group) { return left_[static_cast<std::size_t>(group)]; }

  Int64 most_left() {
    Int64 best = -1;
    for (Int64 group : at_) {
      if (group >= 0 && (best < 0 || left(group) > left(best))) best = group;
    }
    return best;
  }

  const Int64 groups_;
  std::vector<Int64> left_;  // [groups]: blocks not yet given out
  std::vector<Int64> at_;    // [workers]: the kv head each is at, or -1
  Int64 fresh_ = 0;          // the first kv head that nobody has begun
  std::mutex mutex_;
};

}  // namespace forge::cpu
