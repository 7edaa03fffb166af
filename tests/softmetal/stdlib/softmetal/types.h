// Scalar and vector types of the Metal shading language.
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;  // bfloat is not there: kernels take its bits

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX 3.40282346638528859812e+38f
#define FLT_MIN 1.17549435082228750797e-38f
#define FLT_EPSILON 1.1920928955078125e-7f
#define HUGE_VALF __builtin_inff()
#define M_PI_F 3.14159274101257324219f
#define M_E_F 2.71828174591064453125f
#define M_LOG2E_F 1.44269502162933349609f
#define M_LN2_F 0.693147182464599609375f

namespace metal {

using ::size_t;

template <typename T, int N>
struct vec;

// Friends, and no templates of their own: scalars and references to memory convert to operands.
#define SOFTMETAL_VECTOR_OPERATOR(op, size)             \
  friend vec operator op(vec a, vec b) {                \
    for (int i = 0; i < size; ++i) a[i] = a[i] op b[i]; \
    return a;                                           \
  }                                                     \
  friend vec& operator op## = (vec & a, vec b) { return a = a op b; }
#define SOFTMETAL_VECTOR_OPERATORS(size)         \
  SOFTMETAL_VECTOR_OPERATOR(+, size)             \
  SOFTMETAL_VECTOR_OPERATOR(-, size)             \
  SOFTMETAL_VECTOR_OPERATOR(*, size)             \
  SOFTMETAL_VECTOR_OPERATOR(/, size)             \
  friend vec operator-(vec a) {                  \
    for (int i = 0; i < size; ++i) a[i] = -a[i]; \
    return a;                                    \
  }

template <typename T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  vec() = default;
  vec(T all) : x(all), y(all) {}
  vec(T x_, T y_) : x(x_), y(y_) {}
  template <typename U>
  explicit vec(vec<U, 2> v) : x(T(v.x)), y(T(v.y)) {}
  T& operator[](int i) { return (&x)[i]; }
  T operator[](int i) const { return (&x)[i]; }
  SOFTMETAL_VECTOR_OPERATORS(2)
};

template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  vec() = default;
  vec(T all) : x(all), y(all), z(all) {}
  vec(T x_, T y_, T z_) : x(x_), y(y_), z(z_) {}
  template <typename U>
  explicit vec(vec<U, 3> v) : x(T(v.x)), y(T(v.y)), z(T(v.z)) {}
  T& operator[](int i) { return (&x)[i]; }
  T operator[](int i) const { return (&x)[i]; }
  SOFTMETAL_VECTOR_OPERATORS(3)
};

template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  vec() = default;
  vec(T all) : x(all), y(all), z(all), w(all) {}
  vec(T x_, T y_, T z_, T w_) : x(x_), y(y_), z(z_), w(w_) {}
  template <typename U>
  explicit vec(vec<U, 4> v) : x(T(v.x)), y(T(v.y)), z(T(v.z)), w(T(v.w)) {}
  T& operator[](int i) { return (&x)[i]; }
  T operator[](int i) const { return (&x)[i]; }
  SOFTMETAL_VECTOR_OPERATORS(4)
};

#undef SOFTMETAL_VECTOR_OPERATORS
#undef SOFTMETAL_VECTOR_OPERATOR

}  // namespace metal

#define SOFTMETAL_VECTORS(type)        \
  typedef metal::vec<type, 2> type##2; \
  typedef metal::vec<type, 3> type##3; \
  typedef metal::vec<type, 4> type##4;
SOFTMETAL_VECTORS(char)
SOFTMETAL_VECTORS(uchar)
SOFTMETAL_VECTORS(short)
SOFTMETAL_VECTORS(ushort)
SOFTMETAL_VECTORS(int)
SOFTMETAL_VECTORS(uint)
SOFTMETAL_VECTORS(long)
SOFTMETAL_VECTORS(ulong)
SOFTMETAL_VECTORS(half)
SOFTMETAL_VECTORS(float)
SOFTMETAL_VECTORS(bool)
#undef SOFTMETAL_VECTORS

template <typename To, typename From>
inline To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs types of one size");
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

namespace metal {
using ::as_type;
}
