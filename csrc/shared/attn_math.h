// exp and tanh of the materialized kernels, one text for C++ and for Metal shaders, so that every
// device computes the same bits. Float arithmetic and fma only; build with contraction off.
//
// Contract, tested over every float:
//   attn_exp   at most 2 ulp; 0 below -87.33 (no subnormal results); +inf above 88.7228;
//              NaN from NaN
//   attn_tanh  at most 2 ulp; odd; tanh(+-inf) = +-1; tanh(x) = x for tiny x; NaN only from NaN
#pragma once

#include "shared/attn_params.h"

#ifndef __METAL_VERSION__
#include <cmath>
#include <cstring>
#endif

namespace forge {

#ifdef __METAL_VERSION__
FORGE_INLINE float attn_fma(float a, float b, float c) { return metal::fma(a, b, c); }
FORGE_INLINE float float_from_bits(Int32 bits) { return as_type<float>(bits); }
#else
FORGE_INLINE float attn_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
FORGE_INLINE double attn_fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
FORGE_INLINE float float_from_bits(Int32 bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
#endif

// 2^n for n in [-126, 127].
FORGE_INLINE float power_of_two(Int32 n) { return float_from_bits((n + 127) << 23); }

FORGE_INLINE float attn_exp(float x) {
  if (x != x) return x;
  if (x < -87.33f) return 0.0f;
  if (x > 88.7228394f) return float_from_bits(0x7f800000);
  // x = n * ln(2) + r with |r| <= ln(2) / 2. Adding 1.5 * 2^23 rounds to the nearest integer.
  float shifted = x * 1.44269504f + 12582912.0f;
  float n = shifted - 12582912.0f;
  float r = attn_fma(n, -0.693145752f, x);  // ln(2), high part: n times it is exact
  r = attn_fma(n, -1.42860677e-6f, r);      // ln(2), low part
  // (exp(r) - 1 - r) / r^2, minimax fit, 4e-9 relative
  float p = 0.00138145965f;
  p = attn_fma(p, r, 0.00836871751f);
  p = attn_fma(p, r, 0.0416683890f);
  p = attn_fma(p, r, 0.166665211f);
  p = attn_fma(p, r, 0.499999940f);
  p = attn_fma(p * r, r, r) + 1.0f;
  // Two factors, since 2^128 is no float.
  Int32 exponent = (Int32)n;
  Int32 first = exponent >> 1;
  return p * power_of_two(first) * power_of_two(exponent - first);
}

FORGE_INLINE float attn_tanh(float x) {
  float a = x < 0.0f ? -x : x;
  float t;
  if (a < 1e-4f) {
    return x;  // x - x^3 / 3 rounds to x; keeps the sign of zero
  } else if (a < 0.625f) {
    // (tanh(x) - x) / x^3 in u = x^2, minimax fit, 5e-9 relative to tanh
    float u = x * x;
    float p = -0.00570498034f;
    p = attn_fma(p, u, 0.0206390787f);
    p = attn_fma(p, u, -0.0537397116f);
    p = attn_fma(p, u, 0.133314416f);
    p = attn_fma(p, u, -0.333332807f);
    return attn_fma(x * u, p, x);
  } else if (a < 9.1f) {
    t = 1.0f - 2.0f * (1.0f / (attn_exp(2.0f * a) + 1.0f));  // the bits of 2 / (...), but quicker
  } else if (a == a) {
    t = 1.0f;
  } else {
    return x;
  }
  return x < 0.0f ? -t : t;
}

#ifndef __METAL_VERSION__
// float64 exists on the CPU only and takes the standard library's functions.
FORGE_INLINE double attn_exp(double x) { return std::exp(x); }
FORGE_INLINE double attn_tanh(double x) { return std::tanh(x); }
#endif

}  // namespace forge
