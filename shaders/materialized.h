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

METAL_FUNC float dot(device const float* a, device const float* b, Int32 hd) {
  float sum = 0.0f;
  for (Int32 d = 0; d < hd; ++d) sum = attn_fma(a[d], b[d], sum);
  return sum;
}

// y += a * x
METAL_FUNC void add_scaled(device float* y, float a, device const float* x, Int32 hd) {
  for (Int32 c = 0; c < hd; ++c) y[c] = attn_fma(a, x[c], y[c]);
}

// Whether a row has a weight of zero for every key: it is dead.
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
