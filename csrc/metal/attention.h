// Both families on the Apple GPU. No metal-cpp here: where Metal is not built, no_metal.cpp stands
// behind the same declarations.
#pragma once

#include <array>
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

// One dispatch of a plan: `groups` threadgroups of `threads` threads each.
struct StreamDispatch {
  std::string kernel;
  std::vector<std::pair<int, bool>> switches;  // values of its function constants, by their index
  std::array<Int64, 3> groups;
  Int32 threads;
  std::vector<Int64> grid;  // AttnGrid
  bool begins_another;      // the command buffer before it holds enough: commit that first
};

// A call of the fused family for a framework that encodes it in its own command stream: what to
// dispatch, in order, and the bytes of the parameters, as words.
struct StreamPlan {
  std::vector<Int64> params;                           // AttnParams
  std::vector<Int64> ranges;                           // AttnRange, one a sequence
  std::vector<std::pair<const char*, Int64>> scratch;  // memory of the call's own, in floats
  std::vector<StreamDispatch> dispatches;
};

// Reads the operands' shapes, strides and addresses, never their memory: an operand lies at the
// offset at which the framework binds it. Needs no device. `cut`: into dispatches as short as a
// watchdog asks for; else each kernel is one.
StreamPlan plan(const Problem& problem, bool cut);

// The shaders as one text.
const char* shader_text();

}  // namespace forge::metal
