// Scalar and vector types of the Metal shading language.
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;

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
};

template <typename T, int N, typename F>
inline vec<T, N> componentwise(vec<T, N> a, vec<T, N> b, F f) {
  vec<T, N> result;
  for (int i = 0; i < N; ++i) result[i] = f(a[i], b[i]);
  return result;
}

// The scalar operand takes the vector's component type, as the language converts it.
template <typename T>
struct identity {
  typedef T type;
};
template <typename T>
using scalar = typename identity<T>::type;

#define SOFTMETAL_VECTOR_OPERATOR(op)                                 \
  template <typename T, int N>                                        \
  inline vec<T, N> operator op(vec<T, N> a, vec<T, N> b) {            \
    return componentwise(a, b, [](T p, T q) -> T { return p op q; }); \
  }                                                                   \
  template <typename T, int N>                                        \
  inline vec<T, N> operator op(vec<T, N> a, scalar<T> b) {            \
    return a op vec<T, N>(b);                                         \
  }                                                                   \
  template <typename T, int N>                                        \
  inline vec<T, N> operator op(scalar<T> a, vec<T, N> b) {            \
    return vec<T, N>(a) op b;                                         \
  }                                                                   \
  template <typename T, int N>                                        \
  inline vec<T, N>& operator op## = (vec<T, N> & a, vec<T, N> b) {    \
    return a = a op b;                                                \
  }                                                                   \
  template <typename T, int N>                                        \
  inline vec<T, N>& operator op## = (vec<T, N> & a, scalar<T> b) {    \
    return a = a op vec<T, N>(b);                                     \
  }
SOFTMETAL_VECTOR_OPERATOR(+)
SOFTMETAL_VECTOR_OPERATOR(-)
SOFTMETAL_VECTOR_OPERATOR(*)
SOFTMETAL_VECTOR_OPERATOR(/)
#undef SOFTMETAL_VECTOR_OPERATOR

template <typename T, int N>
inline vec<T, N> operator-(vec<T, N> a) {
  for (int i = 0; i < N; ++i) a[i] = -a[i];
  return a;
}

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
