// The page size that the program is told. The rest is the C library's answer.
#include <dlfcn.h>

#include "runtime/control.h"

namespace {

constexpr int kPageSize = 30;  // _SC_PAGESIZE, and _SC_PAGE_SIZE

}  // namespace

// Of the module alone, where it takes the place of the C library's: what is declared in <unistd.h>
// would be everybody's.
extern "C" __attribute__((visibility("hidden"))) long sysconf(int name) {
  static const auto real = reinterpret_cast<long (*)(int)>(dlsym(RTLD_DEFAULT, "sysconf"));
  std::int64_t set = softmetal::setting(softmetal::Setting::kPageBytes);
  return name == kPageSize && set != 0 ? long(set) : real(name);
}
