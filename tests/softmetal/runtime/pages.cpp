#include "runtime/pages.h"

#include <unistd.h>

#include <cstdio>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace softmetal {

std::uint64_t page_bytes() {
  static const auto bytes = std::uint64_t(sysconf(_SC_PAGESIZE));
  return bytes;
}

PageAccess page_access(const void* begin, std::uint64_t length) {
  std::FILE* maps = std::fopen("/proc/self/maps", "re");
  if (maps == nullptr) return PageAccess::kNone;
  std::uint64_t at = reinterpret_cast<std::uintptr_t>(begin);
  std::uint64_t end = at + length;
  PageAccess access = PageAccess::kReadWrite;
  unsigned long long from, to;
  char flags[8];
  char line[512];
  // Mappings come in ascending order; a line may be longer than the buffer.
  while (at < end && std::fgets(line, sizeof line, maps) != nullptr) {
    if (std::sscanf(line, "%llx-%llx %7s", &from, &to, flags) != 3) continue;
    if (to <= at) continue;
    if (from > at || flags[0] != 'r') break;
    if (flags[1] != 'w') access = PageAccess::kReadOnly;
    at = to;
  }
  std::fclose(maps);
  return at < end ? PageAccess::kNone : access;
}

// Asks the processor itself: not every compiler's run-time library can.
bool processor_runs_kernels() {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  constexpr unsigned kFma = 1u << 12, kOsSavesVectors = 1u << 27, kAvx2 = 1u << 5;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & kFma) || !(c & kOsSavesVectors)) return false;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & kAvx2);
#else
  return true;
#endif
}

}  // namespace softmetal
