// Functions of the Metal shading language's math library, in its precise forms. fma and exp count.
// exp and exp2 may be off by 4 ulp, as the language allows; the device's seed says how.
#pragma once

#include "softmetal/launch.h"
#include "softmetal/types.h"

namespace softmetal {

// A float less than `most` ulp from `exact`, the value of a function at x; the same for the same x.
// 0, 1, infinities and NaN stay: exp(0) is 1 on every device.
inline float inexact(double exact, float x, double most) {
  float nearest = float(exact);
  if (nearest == 0.0f || nearest == 1.0f || !__builtin_isfinite(nearest)) return nearest;
  uint32_t hash, bits;
  __builtin_memcpy(&hash, &x, sizeof hash);
  __builtin_memcpy(&bits, &nearest, sizeof bits);
  hash = (hash ^ launch->freedom.noise) * 0x7feb352du;
  hash = (hash ^ hash >> 15) * 0x846ca68bu;
  hash ^= hash >> 16;
  bits &= 0x7f800000u;
  float power;  // of two
  __builtin_memcpy(&power, &bits, sizeof power);
  // Rounding adds up to half an ulp to what is added here.
  double share = double(hash) * 0x1p-31 - 1.0;
  float result = float(exact + share * (most - 0.5) * 0x1p-23 * double(power));
  return __builtin_isfinite(result) ? result : nearest;
}

inline bool is_plain() { return launch->freedom.noise == 0; }

}  // namespace softmetal

namespace metal {

inline float fma(float a, float b, float c) {
  softmetal::counters.fmas += 1;
  return __builtin_fmaf(a, b, c);
}
inline float exp(float x) {
  softmetal::counters.exps += 1;
  if (softmetal::is_plain()) return __builtin_expf(x);
  return softmetal::inexact(__builtin_exp(double(x)), x, 4.0);
}
inline float exp2(float x) {
  softmetal::counters.exps += 1;
  if (softmetal::is_plain()) return __builtin_exp2f(x);
  return softmetal::inexact(__builtin_exp2(double(x)), x, 4.0);
}

#define SOFTMETAL_FLOAT_FUNCTION(name) \
  inline float name(float x) { return __builtin_##name##f(x); }
SOFTMETAL_FLOAT_FUNCTION(log)
SOFTMETAL_FLOAT_FUNCTION(log2)
SOFTMETAL_FLOAT_FUNCTION(tanh)
SOFTMETAL_FLOAT_FUNCTION(sin)
SOFTMETAL_FLOAT_FUNCTION(cos)
SOFTMETAL_FLOAT_FUNCTION(sqrt)
SOFTMETAL_FLOAT_FUNCTION(fabs)
SOFTMETAL_FLOAT_FUNCTION(floor)
SOFTMETAL_FLOAT_FUNCTION(ceil)
SOFTMETAL_FLOAT_FUNCTION(rint)
SOFTMETAL_FLOAT_FUNCTION(round)
SOFTMETAL_FLOAT_FUNCTION(trunc)
#undef SOFTMETAL_FLOAT_FUNCTION

inline float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float pow(float x, float y) { return __builtin_powf(x, y); }
inline float fmod(float x, float y) { return __builtin_fmodf(x, y); }
inline float copysign(float x, float y) { return __builtin_copysignf(x, y); }
inline float ldexp(float x, int n) { return __builtin_ldexpf(x, n); }
inline float fmax(float x, float y) { return __builtin_fmaxf(x, y); }
inline float fmin(float x, float y) { return __builtin_fminf(x, y); }
inline float divide(float x, float y) { return x / y; }

inline bool isnan(float x) { return x != x; }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool signbit(float x) { return __builtin_signbit(x); }

// max and min of floats drop a NaN, as the language says.
inline float max(float x, float y) { return __builtin_fmaxf(x, y); }
inline float min(float x, float y) { return __builtin_fminf(x, y); }
inline float abs(float x) { return __builtin_fabsf(x); }
inline float clamp(float x, float low, float high) { return fmin(fmax(x, low), high); }

// Overloads, not templates: mixed types are ambiguous, as they are for Metal's compiler.
#define SOFTMETAL_INTEGER_FUNCTIONS(type)                   \
  inline type max(type x, type y) { return x > y ? x : y; } \
  inline type min(type x, type y) { return x < y ? x : y; } \
  inline type clamp(type x, type low, type high) { return min(max(x, low), high); }
SOFTMETAL_INTEGER_FUNCTIONS(short)
SOFTMETAL_INTEGER_FUNCTIONS(ushort)
SOFTMETAL_INTEGER_FUNCTIONS(int)
SOFTMETAL_INTEGER_FUNCTIONS(uint)
SOFTMETAL_INTEGER_FUNCTIONS(long)
SOFTMETAL_INTEGER_FUNCTIONS(ulong)
#undef SOFTMETAL_INTEGER_FUNCTIONS
inline int abs(int x) { return x < 0 ? -x : x; }
inline long abs(long x) { return x < 0 ? -x : x; }

inline float select(float no, float yes, bool which) { return which ? yes : no; }
inline int select(int no, int yes, bool which) { return which ? yes : no; }
inline uint select(uint no, uint yes, bool which) { return which ? yes : no; }

template <int N>
inline vec<float, N> fma(vec<float, N> a, vec<float, N> b, vec<float, N> c) {
  for (int i = 0; i < N; ++i) c[i] = fma(a[i], b[i], c[i]);
  return c;
}
template <int N>
inline float dot(vec<float, N> a, vec<float, N> b) {
  float sum = a.x * b.x;
  for (int i = 1; i < N; ++i) sum = sum + a[i] * b[i];
  return sum;
}
#define SOFTMETAL_VECTOR_FUNCTION(name)            \
  template <int N>                                 \
  inline vec<float, N> name(vec<float, N> x) {     \
    for (int i = 0; i < N; ++i) x[i] = name(x[i]); \
    return x;                                      \
  }
SOFTMETAL_VECTOR_FUNCTION(exp)
SOFTMETAL_VECTOR_FUNCTION(exp2)
SOFTMETAL_VECTOR_FUNCTION(fabs)
#undef SOFTMETAL_VECTOR_FUNCTION
template <typename T, int N>
inline vec<T, N> max(vec<T, N> a, vec<T, N> b) {
  for (int i = 0; i < N; ++i) a[i] = max(a[i], b[i]);
  return a;
}
template <typename T, int N>
inline vec<T, N> min(vec<T, N> a, vec<T, N> b) {
  for (int i = 0; i < N; ++i) a[i] = min(a[i], b[i]);
  return a;
}

namespace precise {
using metal::cos;
using metal::divide;
using metal::exp;
using metal::exp2;
using metal::log;
using metal::log2;
using metal::pow;
using metal::rsqrt;
using metal::sin;
using metal::sqrt;
using metal::tanh;
}  // namespace precise

// Here they are the precise ones: a device may be better than its bound.
namespace fast {
using metal::clamp;
using metal::cos;
using metal::divide;
using metal::exp;
using metal::exp2;
using metal::log;
using metal::log2;
using metal::max;
using metal::min;
using metal::pow;
using metal::rsqrt;
using metal::sin;
using metal::sqrt;
using metal::tanh;
}  // namespace fast

}  // namespace metal
