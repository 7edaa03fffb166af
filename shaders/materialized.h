// What the materialized kernels share. One rounding per operation, in the order of
// csrc/materialized/kernels.cpp, so that both give the same bits.
#pragma once

#include <metal_stdlib>

#include "constants.h"
#include "mask_options.h"
#include "shared/attn_math.h"
#include "shared/attn_params.h"

namespace forge {

// (b, head, t) of a row numbered over [B, heads, length].
struct RowPosition {
  Int64 b;
  Int64 head;
  Int64 t;
};

METAL_FUNC RowPosition row_position(Int64 row, Int64 heads, Int64 length) {
  RowPosition at;
  at.b = row / (heads * length);
  at.head = row / length % heads;
  at.t = row % length;
  return at;
}

// The keys that the ranges leave query i of sequence b.
METAL_FUNC IndexRange keys_of(constant AttnParams& params, device const AttnRange* ranges, Int64 b,
                              Int64 i) {
  AttnRange range = ranges[has_runs ? b * params.Tq + i : b];
  return visible_keys(attn_band(mask_options(params), range), i);
}

// bias and mask, where there are any.
struct FloatPairs {
  device const float* bias;
  device const uchar* mask;
};

METAL_FUNC float bias_of(constant AttnParams& params, FloatPairs arrays, Int64 b, Int64 h, Int64 i,
                         Int64 j) {
  return arrays.bias[pair_offset(params.bias, b, h, i, j)];
}

// Whether mask and bias leave a pair visible.
METAL_FUNC bool is_pair_shown(constant AttnParams& params, FloatPairs arrays, Int64 b, Int64 h,
                              Int64 i, Int64 j) {
  if (has_mask && arrays.mask[pair_offset(params.mask, b, h, i, j)] == 0) return false;
  return !has_bias || bias_of(params, arrays, b, h, i, j) != -INFINITY;
}

// The elements of an array along an axis of `extent`: element `at`, or all where it has but one.
METAL_FUNC IndexRange summed_axis(bool has_axis, Int64 at, Int64 extent) {
  return has_axis ? index_range(at, at + 1) : index_range(0, extent);
}

METAL_FUNC float dot(device const float* a, device const float* b, Int32 hd) {
  float sum = 0.0f;
  for (Int32 d = 0; d < hd; ++d) sum = attn_fma(a[d], b[d], sum);
  return sum;
}

// y += a * x
METAL_FUNC void add_scaled(device float* y, float a, device const float* x, Int32 hd) {
  for (Int32 c = 0; c < hd; ++c) y[c] = attn_fma(a, x[c], y[c]);
}

// Whether a row has a weight of zero for every key: it is dead, or its sink took everything.
METAL_FUNC bool gives_nothing(device const float* p, Int64 Tk) {
  for (Int64 j = 0; j < Tk; ++j) {
    if (p[j] != 0.0f) return false;  // or NaN
  }
  return true;
}

struct Scaling {
  float scale;
  float softcap;
};

// ds of one (query, key) pair, scale and softcap included.
METAL_FUNC float score_gradient(Scaling scaling, device const float* q, device const float* k,
                                Int32 hd, float p, float dp, float d_row) {
  float ds = p * (dp - d_row) * scaling.scale;
  if (has_softcap) {
    float x = dot(q, k, hd) * scaling.scale;
    float t = attn_tanh(x / scaling.softcap);
    ds = ds * attn_fma(-t, t, 1.0f);
  }
  return ds;
}

}  // namespace forge
