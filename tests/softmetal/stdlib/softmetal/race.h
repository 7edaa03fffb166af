// Data races on threadgroup memory. Each 4 bytes remember who wrote and who read them last and
// when:
//   stamp = threadgroup barriers passed (24 bits) | simdgroup barriers passed (28) | thread (12)
// An access is ordered after a stamp if a threadgroup barrier lies between, or, within one
// simdgroup, a simdgroup barrier. Reads by several threads merge: into "some thread of simdgroup s"
// (kOfSimdgroup + s) or "threads of several simdgroups" (kOfMany). Threads of one threadgroup share
// one CPU thread, so nothing here is atomic.
#pragma once

#include "softmetal/launch.h"

namespace softmetal {

constexpr int kStampGroupShift = 40;
constexpr int kStampSimdShift = 12;
constexpr uint64_t kStampThreadMask = 0xfff;
constexpr uint64_t kOfSimdgroup = 0x400;
constexpr uint64_t kOfMany = 0xfff;

inline uint64_t stamp_simdgroup(uint64_t stamp) {
  uint64_t thread = stamp & kStampThreadMask;
  if (thread == kOfMany) return kOfMany;
  return thread >= kOfSimdgroup ? thread - kOfSimdgroup : thread / kSimdWidth;
}

// Whether what happened at `stamp` is ordered before what the current thread does now.
inline bool ordered(uint64_t stamp, uint64_t clock) {
  if (stamp >> kStampGroupShift != clock >> kStampGroupShift) return true;
  if (((stamp ^ clock) & kStampThreadMask) == 0) return true;
  if (stamp_simdgroup(stamp) != stamp_simdgroup(clock)) return false;
  return stamp >> kStampSimdShift != clock >> kStampSimdShift;
}

inline uint64_t merge_reads(uint64_t stamp, uint64_t clock) {
  if (stamp >> kStampGroupShift != clock >> kStampGroupShift || stamp == clock) return clock;
  uint64_t simdgroup = stamp_simdgroup(clock);
  if (stamp_simdgroup(stamp) != simdgroup) return clock | kOfMany;
  if (stamp >> kStampSimdShift != clock >> kStampSimdShift) return clock;
  return (clock & ~kStampThreadMask) | (kOfSimdgroup + simdgroup);
}

template <size_t kSize>
inline void check_threadgroup_load(const Binding* binding, const void* address) {
  size_t word = size_t((const char*)address - group.memory) / 4;
  uint64_t clock = current->clock;
  for (size_t end = word + (kSize + 3) / 4; word < end; ++word) {
    if (__builtin_expect(!ordered(group.writes[word], clock), 0)) {
      fault_race(binding, address, group.writes[word], false, true);
    }
    if (group.reads[word] != clock) group.reads[word] = merge_reads(group.reads[word], clock);
  }
}

template <size_t kSize>
inline void check_threadgroup_store(const Binding* binding, const void* address) {
  size_t word = size_t((const char*)address - group.memory) / 4;
  uint64_t clock = current->clock;
  for (size_t end = word + (kSize + 3) / 4; word < end; ++word) {
    if (__builtin_expect(!ordered(group.writes[word], clock), 0)) {
      fault_race(binding, address, group.writes[word], true, true);
    }
    if (__builtin_expect(!ordered(group.reads[word], clock), 0)) {
      fault_race(binding, address, group.reads[word], true, false);
    }
    group.writes[word] = clock;
  }
}

}  // namespace softmetal
