// What the operating system and the processor have to say.
#pragma once

#include <cstdint>

namespace softmetal {

enum class PageAccess { kNone, kReadOnly, kReadWrite };

std::uint64_t page_bytes();
// What every page of the range allows.
PageAccess page_access(const void* begin, std::uint64_t length);
// Whether this processor has the instructions that the kernels are compiled to.
bool processor_runs_kernels();

}  // namespace softmetal
