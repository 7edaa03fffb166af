// Both families on the Apple GPU. No metal-cpp here: where Metal is not built, no_metal.cpp stands
// behind the same declarations.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/problem.h"

namespace forge::metal {

// Empty when Metal serves this process; else why it does not. The first call makes the context.
std::string unavailable_reason();
// Likewise for the fused kernels: a device may have Metal and no simdgroup matrices. Until one has
// been compiled, the problem's forward is.
std::string fused_unavailable_reason(const Problem& problem);

// What a call ran on and what became of its arrays: "wrapped", or "copied: <reason>".
struct Ran {
  std::string device;
  std::string library;  // "metallib", or "source" with the reason why
  std::vector<std::pair<std::string, std::string>> arrays;
};

// Computes what problem.pass says and waits for the GPU. Throws std::runtime_error with Metal's own
// text when the device fails; what the outputs hold is then undefined.
Ran run(const Problem& problem);

}  // namespace forge::metal
