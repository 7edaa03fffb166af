#include "metal/attention.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <vector>

#include "metal/buffers.h"
#include "metal/command_stream.h"
#include "metal/context.h"
#include "metal/dispatches.h"
#include "metal/kernels.h"
#include "metal/shader_source.h"

namespace forge::metal {
namespace {

struct Scratch {
  BufferIndex slot;
  const char* name;
  Int64 floats;
};

// How the kernels treat an array; the fused ones write gradients that the materialized ones add to.
Access access_of(Use use, const Problem& problem) {
  switch (use) {
    case Use::kWrite:
    case Use::kWriteIfGiven:
      return Access::kWrite;
    case Use::kAddTo:
    case Use::kAddToIfGiven:
      if (problem.accumulate) return Access::kAddToContent;
      return problem.family == Family::kFused ? Access::kWrite : Access::kAddToZero;
    default:
      return Access::kRead;
  }
}

// Whether the forward keeps o in memory of its own, in float32, and writes halves to the array: the
// sums over runs of keys are rounded once, at their end.
bool rounds_into_o(const Problem& problem) {
  return problem.pass == Pass::kForward && is_half(problem.operands[kBufferO].dtype);
}

// The arrays that the problem's kernels take, bound by their slots.
void add_operands(Buffers& buffers, AttnParams& params, const Problem& problem) {
  for (const OperandInfo& info : operand_table()) {
    const Use use = use_of(info, problem);
    const Operand& operand = problem.operands[info.slot];
    if (use == Use::kNone || (is_optional(use) && operand.data == nullptr)) continue;
    const bool rounded = info.slot == kBufferO && rounds_into_o(problem);
    const BufferIndex slot = rounded ? kBufferRounded : info.slot;
    buffers.add({slot, info.name, access_of(use, problem), operand, strides_in(params, slot),
                 pair_strides_in(params, slot)});
  }
  buffers.add_private(kBufferRanges, "ranges", problem.ranges.data(),
                      problem.ranges.size() * sizeof(AttnRange));
}

std::vector<Kernel> forward_kernels(const Problem& problem, const AttnParams& params) {
  if (problem.family == Family::kMaterialized) return {materialized::fwd(params)};
  if (!fused::is_decode(params)) return {fused::fwd(params)};
  return {fused::decode(params), fused::decode_combine(params)};
}

std::vector<Kernel> backward_kernels(const Problem& problem, const AttnParams& params) {
  const bool has_dlse = problem.operands[kBufferDlse].data != nullptr;
  const bool is_fused = problem.family == Family::kFused;
  const bool adds = problem.accumulate;
  std::vector<Kernel> kernels;
  if (is_fused) {
    kernels = {fused::bwd_d(params, has_dlse), fused::bwd_dq(params, adds),
               fused::bwd_dkv(params, adds)};
  } else {
    kernels = {materialized::bwd_d(params, has_dlse), materialized::bwd_dq(params),
               materialized::bwd_dkv(params)};
  }
  if (problem.operands[kBufferDbias].data != nullptr) {
    kernels.push_back(is_fused ? fused::bwd_dbias(params, adds) : materialized::bwd_dbias(params));
  }
  if (problem.operands[kBufferDsinks].data != nullptr) {
    kernels.push_back(is_fused ? fused::bwd_dsinks(params, adds)
                               : materialized::bwd_dsinks(params, has_dlse));
  }
  return kernels;
}

std::vector<Kernel> kernels_of(const Problem& problem, const AttnParams& params) {
  const bool has_dlse = problem.operands[kBufferDlse].data != nullptr;
  switch (problem.pass) {
    case Pass::kForward:
      return forward_kernels(problem, params);
    case Pass::kBackward:
      return backward_kernels(problem, params);
    case Pass::kBwdD:
      return {materialized::bwd_d(params, has_dlse)};
    case Pass::kBwdDq:
      return {materialized::bwd_dq(params)};
    case Pass::kBwdDkv:
      break;
  }
  return {materialized::bwd_dkv(params)};
}

// Memory of the call's own, in floats.
std::vector<Scratch> scratch_of(const Problem& problem, AttnParams& params) {
  std::vector<Scratch> scratch;
  if (problem.pass == Pass::kBackward) {
    scratch.push_back({kBufferDRow, "d_row", params.B * params.H * params.Tq});
  }
  if (rounds_into_o(problem)) {
    params.o = compact_strides(params.Tq, params.H, params.hv);
    scratch.push_back({kBufferO, "o in float32", params.B * params.o.batch});
  }
  const bool fused_forward = problem.family == Family::kFused && problem.pass == Pass::kForward;
  if (fused_forward && fused::is_decode(params)) {
    scratch.push_back({kBufferPartial, "partial", fused::decode_partial_size(params)});
  }
  return scratch;
}

// Whether every array that has rows has aligned ones, its data being where it is bound.
bool are_aligned(const Problem& problem) {
  const auto& table = operand_table();
  return std::all_of(table.begin(), table.end(), [&](const OperandInfo& info) {
    const Operand& operand = problem.operands[info.slot];
    if (!has_heads(info.axes) || operand.data == nullptr || is_empty(operand)) return true;
    return rows_are_aligned(operand.shape[3], operand.heads_strides(),
                            reinterpret_cast<std::uintptr_t>(operand.data), operand.dtype);
  });
}

template <typename T>
std::vector<Int64> words_of(const T* records, std::size_t count) {
  static_assert(sizeof(T) % sizeof(Int64) == 0, "whole words");
  std::vector<Int64> words(count * (sizeof(T) / sizeof(Int64)));
  if (count > 0) std::memcpy(words.data(), records, count * sizeof(T));
  return words;
}

// Blocks of memory whose pages the device may write: those that nothing but outputs lies in.
std::vector<MemoryBlock> owned_by_outputs(const Problem& problem) {
  std::vector<MemoryBlock> owned;
  for (const OperandInfo& info : operand_table()) {
    const Use use = use_of(info, problem);
    if (is_written(use)) owned.push_back(problem.operands[info.slot].owner);
  }
  return owned;
}

// Which options shape the scores.
void set_options(Switches& switches, const Problem& problem) {
  const Operands& operands = problem.operands;
  switches.has_runs = problem.runs;
  switches.has_bias = operands[kBufferBias].data != nullptr;
  switches.has_mask = operands[kBufferMask].data != nullptr;
  switches.has_sinks = operands[kBufferSinks].data != nullptr;
}

// What the fused kernels are told of the arrays' types.
void set_types(Switches& switches, const Problem& problem) {
  const auto holds_halves = [&](BufferIndex slot) { return is_half(problem.operands[slot].dtype); };
  switches.is_bfloat = problem.kv_dtype == DType::kBFloat16;
  switches.is_half_q = is_half(problem.dtype);
  switches.is_half_kv = is_half(problem.kv_dtype);
  switches.has_rounded = rounds_into_o(problem) || holds_halves(kBufferRounded);
  switches.is_half_dq = holds_halves(kBufferDq);
  switches.is_half_dk = holds_halves(kBufferDk);
  switches.is_half_dv = holds_halves(kBufferDv);
  switches.is_half_bias = holds_halves(kBufferBias);
  switches.is_half_sinks = holds_halves(kBufferSinks);
  switches.is_half_dbias = holds_halves(kBufferDbias);
  switches.is_half_dsinks = holds_halves(kBufferDsinks);
}

}  // namespace

std::string unavailable_reason() {
  try {
    Context::current();
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

std::string fused_unavailable_reason(const Problem& problem) {
  const AutoreleasePool pool;
  try {
    const std::shared_ptr<Context> context = Context::current();
    if (context->runs_fused) return "";
    const AttnParams params = params_as<float>(problem);
    Kernel kernel = fused::is_decode(params) ? fused::decode(params) : fused::fwd(params);
    kernel.switches.is_aligned = true;  // as most calls have it
    set_options(kernel.switches, problem);
    set_types(kernel.switches, problem);
    context->pipelines().get(kernel.name, kernel.switches);
    context->runs_fused = true;
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

Ran run(const Problem& problem) {
  const AutoreleasePool pool;
  const std::shared_ptr<Context> context = Context::current();
  const std::vector<MemoryBlock> owned = owned_by_outputs(problem);
  AttnParams params = params_as<float>(problem);
  Buffers buffers(context->device(), owned);
  CommandStream stream(context, buffers, params);
  add_operands(buffers, params, problem);
  for (const Scratch& own : scratch_of(problem, params)) {
    buffers.add_private(own.slot, own.name, nullptr,
                        static_cast<std::size_t>(own.floats) * sizeof(float));
  }
  buffers.make();
  for (Kernel kernel : kernels_of(problem, params)) {
    set_options(kernel.switches, problem);
    if (problem.family == Family::kFused) {
      kernel.switches.is_aligned = buffers.are_aligned();
      set_types(kernel.switches, problem);
    }
    stream.run(kernel);
  }
  stream.finish();
  buffers.copy_back();
  return {context->device_name(), context->library_origin(), buffers.report()};
}

StreamPlan plan(const Problem& problem, bool cut) {
  AttnParams params = params_as<float>(problem);
  const std::vector<Scratch> scratch = scratch_of(problem, params);
  const bool aligned = are_aligned(problem);
  StreamPlan plan;
  plan.params = words_of(&params, 1);
  plan.ranges = words_of(problem.ranges.data(), problem.ranges.size());
  for (const Scratch& own : scratch) {
    plan.scratch.emplace_back(own.name, own.floats);
  }
  CommandBudget budget;
  for (Kernel kernel : kernels_of(problem, params)) {
    kernel.switches.is_aligned = aligned;
    set_options(kernel.switches, problem);
    set_types(kernel.switches, problem);
    std::vector<std::pair<int, bool>> switches;
    kernel.switches.list(
        [&](FunctionConstant index, bool value) { switches.emplace_back(index, value); });
    for (const Dispatch& dispatch : cut ? dispatches_of(kernel) : whole(kernel)) {
      const AttnGrid grid = grid_of(params, dispatch);
      plan.dispatches.push_back({kernel.name,
                                 switches,
                                 {dispatch.count[0], dispatch.count[1], dispatch.count[2]},
                                 kernel.threadgroup_threads,
                                 words_of(&grid, 1),
                                 budget.begins_another(dispatch)});
    }
  }
  return plan;
}

const char* shader_text() { return kShaderSource; }

}  // namespace forge::metal
