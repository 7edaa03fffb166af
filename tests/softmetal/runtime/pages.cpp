#include "runtime/pages.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace softmetal {

namespace {

struct Mapping {
  std::uint64_t begin = 0, end = 0;
  bool readable = false, writeable = false;
};

// A request to /proc/self/maps for one mapping, which Linux 6.11 and later answer at once. The C
// library's headers may be older, so it is spelled out here.
struct MappingQuery {
  std::uint64_t size, flags, address;
  std::uint64_t begin, end, mapping_flags, page_size, offset, inode;
  std::uint32_t device_major, device_minor, name_size, build_id_size;
  std::uint64_t name, build_id;
};
constexpr unsigned long kMappingQuery = _IOWR('f', 17, MappingQuery);
constexpr std::uint64_t kReadable = 1, kWriteable = 2;

enum class Answer { kFound, kNone, kUnsupported };

Answer query_mapping(int maps, std::uint64_t address, Mapping* found) {
  MappingQuery query = {};
  query.size = sizeof query;
  query.address = address;
  if (ioctl(maps, kMappingQuery, &query) != 0) {
    return errno == ENOENT ? Answer::kNone : Answer::kUnsupported;
  }
  *found = {query.begin, query.end, (query.mapping_flags & kReadable) != 0,
            (query.mapping_flags & kWriteable) != 0};
  return Answer::kFound;
}

// Narrows what is allowed by a mapping that holds `at`; false: nothing is.
bool narrow(const Mapping& mapping, std::uint64_t* at, PageAccess* access) {
  if (mapping.begin > *at || !mapping.readable) return false;
  if (!mapping.writeable) *access = PageAccess::kReadOnly;
  *at = mapping.end;
  return true;
}

// All mappings as text, in ascending order: hundreds of lines.
PageAccess access_from_text(std::uint64_t at, std::uint64_t end) {
  std::FILE* maps = std::fopen("/proc/self/maps", "re");
  if (maps == nullptr) return PageAccess::kNone;
  PageAccess access = PageAccess::kReadWrite;
  char line[512];  // a longer one comes in pieces
  while (at < end && std::fgets(line, sizeof line, maps) != nullptr) {
    unsigned long long from, to;
    char flags[8];
    if (std::sscanf(line, "%llx-%llx %7s", &from, &to, flags) != 3 || to <= at) continue;
    if (!narrow({from, to, flags[0] == 'r', flags[1] == 'w'}, &at, &access)) break;
  }
  std::fclose(maps);
  return at < end ? PageAccess::kNone : access;
}

}  // namespace

std::uint64_t page_bytes() { return std::uint64_t(sysconf(_SC_PAGESIZE)); }

PageAccess page_access(const void* begin, std::uint64_t length) {
  std::uint64_t at = reinterpret_cast<std::uintptr_t>(begin);
  const std::uint64_t first = at, end = at + length;
  int maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  if (maps < 0) return PageAccess::kNone;
  PageAccess access = PageAccess::kReadWrite;
  Answer answer = Answer::kFound;
  Mapping mapping;
  while (at < end && answer == Answer::kFound) {
    answer = query_mapping(maps, at, &mapping);
    if (answer == Answer::kFound && !narrow(mapping, &at, &access)) break;
  }
  close(maps);
  if (answer == Answer::kUnsupported) return access_from_text(first, end);
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
