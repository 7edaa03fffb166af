// Data races on threadgroup memory. Each 4 bytes remember who wrote and who read them last and
// when:
//   stamp = threadgroup barriers passed (24 bits) | simdgroup barriers passed (28) | thread (12)
// An access is ordered after a stamp if a threadgroup barrier lies between, or, within one
// simdgroup, a simdgroup barrier. Reads by several threads merge: into "some thread of simdgroup s"
// (kOfSimdgroup + s) or "threads of several simdgroups" (kOfMany). Threads of one threadgroup share
// one CPU thread, so nothing here is atomic.
//
// And on device memory: what one threadgroup writes, no other touches in the same dispatch. Each 2
// bytes that an argument of the dispatch may write remember the threadgroups that did.
#pragma once

#include "softmetal/launch.h"

namespace softmetal {

constexpr int kStampGroupShift = 40;
constexpr int kStampSimdShift = 12;
constexpr uint64_t kStampThreadMask = 0xfff;
constexpr uint64_t kOfSimdgroup = 0x400;
constexpr uint64_t kOfMany = 0xfff;  // its stamp has ones in the simdgroup barriers' place too
constexpr uint64_t kBelowGroup = (uint64_t(1) << kStampGroupShift) - 1;

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
  if (stamp >> kStampGroupShift != clock >> kStampGroupShift) return clock;
  uint64_t simdgroup = stamp_simdgroup(clock);
  if (stamp_simdgroup(stamp) != simdgroup) return clock | kBelowGroup;
  if (stamp >> kStampSimdShift != clock >> kStampSimdShift) return clock;
  return (clock & ~kStampThreadMask) | (kOfSimdgroup + simdgroup);
}

// These are where kernels spend their time: what is usual takes a few instructions.
template <size_t kSize>
inline __attribute__((always_inline)) void check_threadgroup_load(const Binding* binding,
                                                                  const void* address) {
  size_t word = size_t((const char*)address - group.memory) / 4;
  uint64_t clock = current->clock;
  for (size_t end = word + (kSize + 3) / 4; word < end; ++word) {
    uint64_t written = group.writes[word], read = group.reads[word];
    if (__builtin_expect(written >> kStampGroupShift == clock >> kStampGroupShift, 0) &&
        !ordered(written, clock)) {
      fault_race(binding, address, written, false, true);
    }
    if (read != clock && read != (clock | kBelowGroup)) {
      group.reads[word] = merge_reads(read, clock);
    }
  }
}

template <size_t kSize>
inline __attribute__((always_inline)) void check_threadgroup_store(const Binding* binding,
                                                                   const void* address) {
  size_t word = size_t((const char*)address - group.memory) / 4;
  uint64_t clock = current->clock;
  for (size_t end = word + (kSize + 3) / 4; word < end; ++word) {
    uint64_t written = group.writes[word], read = group.reads[word];
    if (__builtin_expect(written >> kStampGroupShift == clock >> kStampGroupShift, 0) &&
        !ordered(written, clock)) {
      fault_race(binding, address, written, true, true);
    }
    if (__builtin_expect(read >> kStampGroupShift == clock >> kStampGroupShift, 0) &&
        !ordered(read, clock)) {
      fault_race(binding, address, read, true, false);
    }
    group.writes[word] = clock;
  }
}

struct DeviceMarks {
  uint32_t writer;  // the number of a threadgroup, 0: nobody
  uint32_t reader;  // likewise, or kOfManyGroups
};
constexpr uint32_t kOfManyGroups = 0xffffffffu;
constexpr size_t kBytesAMark = 2;

struct DeviceShadow {
  const char* begin;  // of the memory
  DeviceMarks* marks;
  DeviceMarks* at(const void* address) const {
    return marks + size_t((const char*)address - begin) / kBytesAMark;
  }
};

template <size_t kSize>
inline void check_device_load(const Binding* binding, const void* address) {
  DeviceMarks* mark = binding->shadow->at(address);
  uint32_t self = group.number;
  for (DeviceMarks* end = mark + (kSize + 1) / kBytesAMark; mark < end; ++mark) {
    if (__builtin_expect(mark->writer != 0 && mark->writer != self, 0)) {
      fault_device_race(binding, address, mark->writer, false, true);
    }
    mark->reader = mark->reader == 0 || mark->reader == self ? self : kOfManyGroups;
  }
}

template <size_t kSize>
inline void check_device_store(const Binding* binding, const void* address) {
  DeviceMarks* mark = binding->shadow->at(address);
  uint32_t self = group.number;
  for (DeviceMarks* end = mark + (kSize + 1) / kBytesAMark; mark < end; ++mark) {
    if (__builtin_expect(mark->writer != 0 && mark->writer != self, 0)) {
      fault_device_race(binding, address, mark->writer, true, true);
    }
    if (__builtin_expect(mark->reader != 0 && mark->reader != self, 0)) {
      fault_device_race(binding, address, mark->reader, true, false);
    }
    mark->writer = self;
  }
}

}  // namespace softmetal
