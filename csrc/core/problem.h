// The one description of a call that every backend takes: sizes, options, and the arrays it works
// on.
#pragma once

#include <cstdint>
#include <vector>

#include "core/operands.h"
#include "shared/attn_mask.h"
#include "shared/attn_params.h"

namespace forge {

// Two families: materialized keeps p for the backward and runs in a fixed order, fused recomputes p
// from the saved row statistics.
enum class Family { kMaterialized, kFused };

inline const char* family_name(Family family) {
  return family == Family::kFused ? "fused" : "materialized";
}

// The options that shape the scores, key ranges apart: these come one a sequence or a query.
struct MaskAndScale {
  bool causal = false;
  Int64 window_left = -1, window_right = -1;  // -1: all
  double scale = 1, softcap = 0;  // as given; kernels take them in the type they compute in
};

struct Problem : MaskAndScale {
  Pass pass = Pass::kForward;
  Family family = Family::kFused;
  DType dtype = DType::kFloat32;     // of q
  DType kv_dtype = DType::kFloat32;  // of k and v: q's, or half beside float32
  bool accumulate = false;           // gradients are added to what dq, dk and dv hold
  Int64 B = 0, Tq = 0, Tk = 0;
  Int32 H = 0, Hkv = 0, hd = 0, hv = 0;
  bool runs = false;              // a range for each query
  std::vector<AttnRange> ranges;  // [B], or [B, Tq] with runs
  Operands operands;
};

// Options that a kernel without them must refuse: what they are called, empty where the call has
// none.
inline const char* beyond_plain(const Problem& problem) {
  if (problem.runs) return "a range of keys for each query";
  if (problem.hv != problem.hd) return "another head dim of v than of q and k";
  if (problem.operands[kBufferBias].data) return "bias";
  if (problem.operands[kBufferMask].data) return "mask";
  return problem.operands[kBufferSinks].data ? "sinks" : "";
}

// What this call does with an array.
inline Use use_of(const OperandInfo& info, const Problem& problem) {
  const bool is_fused = problem.family == Family::kFused;
  if (info.materialized_only && is_fused) return Use::kNone;
  const Use use = info.uses[static_cast<std::size_t>(problem.pass)];
  if (use == Use::kReadByFused) return is_fused ? Use::kRead : Use::kReadIfGiven;
  return use;
}

// Where kernels find the strides of a [B, T, heads, hd] array; null for the others.
template <typename Real>
AttnStrides* strides_in(AttnParamsOf<Real>& params, BufferIndex slot) {
  switch (slot) {
    case kBufferQ:
      return &params.q;
    case kBufferK:
      return &params.k;
    case kBufferV:
      return &params.v;
    case kBufferO:
      return &params.o;
    case kBufferDout:
      return &params.dout;
    case kBufferDq:
      return &params.dq;
    case kBufferDk:
      return &params.dk;
    case kBufferDv:
      return &params.dv;
    case kBufferRounded:
      return &params.rounded;
    default:
      return nullptr;
  }
}

// Likewise of an array over pairs or rows, each axis 1 or the problem's.
template <typename Real>
AttnPairStrides* pair_strides_in(AttnParamsOf<Real>& params, BufferIndex slot) {
  switch (slot) {
    case kBufferBias:
      return &params.bias;
    case kBufferMask:
      return &params.mask;
    case kBufferSinks:
      return &params.sinks;
    case kBufferDbias:
      return &params.dbias;
    case kBufferDsinks:
      return &params.dsinks;
    default:
      return nullptr;
  }
}

// AttnPairAxes of such an array.
inline Int32 axes_of(const Operand& operand) {
  Int32 axes = 0;
  for (int axis = 0; axis < operand.ndim; ++axis) {
    if (operand.shape[static_cast<std::size_t>(axis)] != 1) axes |= 1 << axis;
  }
  return axes;
}

// Sizes, options and strides as kernels take them: scale and softcap rounded to their type.
template <typename Real>
AttnParamsOf<Real> params_as(const Problem& problem) {
  AttnParamsOf<Real> to;
  to.B = problem.B;
  to.Tq = problem.Tq;
  to.Tk = problem.Tk;
  to.window_left = problem.window_left;
  to.window_right = problem.window_right;
  for (const OperandInfo& info : operand_table()) {
    AttnStrides* strides = strides_in(to, info.slot);
    const Operand& operand = problem.operands[info.slot];
    if (strides != nullptr) *strides = operand.heads_strides();
    AttnPairStrides* pairs = pair_strides_in(to, info.slot);
    if (pairs != nullptr) *pairs = operand.pair_strides();
  }
  to.H = problem.H;
  to.Hkv = problem.Hkv;
  to.hd = problem.hd;
  to.hv = problem.hv;
  to.runs = problem.runs ? 1 : 0;
  to.dbias_axes = axes_of(problem.operands[kBufferDbias]);
  to.dsinks_axes = axes_of(problem.operands[kBufferDsinks]);
  to.causal = problem.causal ? 1 : 0;
  to.scale = static_cast<Real>(problem.scale);
  to.softcap = static_cast<Real>(problem.softcap);
  return to;
}

// Position of row (b, h, i) in [B, H, Tq].
template <typename Real>
FORGE_INLINE Int64 row_index(const AttnParamsOf<Real>& params, Int64 b, Int64 h, Int64 i) {
  return (b * params.H + h) * params.Tq + i;
}

}  // namespace forge
