// What the materialized kernels share. One rounding per operation, in the order of
// csrc/materialized/kernels.cpp, so that both give the same bits.
#pragma once

#include <metal_stdlib>

#include "constants.h"
#include "shared/attn_mask.h"
#include "shared/attn_math.h"
#include "shared/attn_params.h"

namespace forge {

// (b, head, t) of a row numbered over [B, heads, length].
struct RowPosition {
  Int64 b;
  Int64 head;
  Int64 t;
};

static inline RowPosition row_position(Int64 row, Int64 heads, Int64 length) {
  RowPosition at;
  at.b = row / (heads * length);
  at.head = row / length % heads;
  at.t = row % length;
  return at;
}

static inline float dot(device const float* a, device const float* b, Int32 hd) {
  float sum = 0.0f;
  for (Int32 d = 0; d < hd; ++d) sum = attn_fma(a[d], b[d], sum);
  return sum;
}

// y += a * x
static inline void add_scaled(device float* y, float a, device const float* x, Int32 hd) {
  for (Int32 c = 0; c < hd; ++c) y[c] = attn_fma(a, x[c], y[c]);
}

// ds of one (query, key) pair, scale and softcap included.
static inline float score_gradient(AttnParams params, device const float* q, device const float* k,
                                   float p, float dp, float d_row) {
  float ds = p * (dp - d_row) * params.scale;
  if (has_softcap) {
    float x = dot(q, k, params.hd) * params.scale;
    float t = attn_tanh(x / params.softcap);
    ds = ds * attn_fma(-t, t, 1.0f);
  }
  return ds;
}

}  // namespace forge
