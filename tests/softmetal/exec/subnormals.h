// Subnormal numbers as Apple's GPUs take and give them: as zeros.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace softmetal {

// Of this CPU thread, for as long as it lives.
class FlushSubnormals {
 public:
  explicit FlushSubnormals(bool flush) : before_(control()) {
    if (flush) set_control(before_ | kFlush);
  }
  FlushSubnormals(const FlushSubnormals&) = delete;
  ~FlushSubnormals() { set_control(before_); }

 private:
#if defined(__x86_64__)
  static constexpr std::uint64_t kFlush = 0x8040;  // FTZ, DAZ
  static std::uint64_t control() { return _mm_getcsr(); }
  static void set_control(std::uint64_t value) { _mm_setcsr(unsigned(value)); }
#else
  static constexpr std::uint64_t kFlush = std::uint64_t(1) << 24;  // FZ
  static std::uint64_t control() {
    std::uint64_t value;
    __asm__ volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void set_control(std::uint64_t value) { __asm__ volatile("msr fpcr, %0" : : "r"(value)); }
#endif
  std::uint64_t before_;
};

}  // namespace softmetal
