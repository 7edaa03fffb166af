// Declarations of what <metal_stdlib> offers to the shaders, for the dialect check: names, types
// and overloads of the Metal Shading Language 3.1, nothing more and no bodies that compute. What is
// not declared here is an error in a shader. The spellings __private (thread), __local (device),
// __global (threadgroup) and __constant (constant) are those of msl_text.py.
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

#define FORGE_VECTORS(T, name)                                                          \
  typedef T name##2 __attribute__((ext_vector_type(2)));                                \
  typedef T name##3 __attribute__((ext_vector_type(3)));                                \
  typedef T name##4 __attribute__((ext_vector_type(4)));                                \
  template <>                                                                           \
  struct vector_of<T, 2> {                                                              \
    typedef name##2 type;                                                               \
  };                                                                                    \
  template <>                                                                           \
  struct vector_of<T, 3> {                                                              \
    typedef name##3 type;                                                               \
  };                                                                                    \
  template <>                                                                           \
  struct vector_of<T, 4> {                                                              \
    typedef name##4 type;                                                               \
  };                                                                                    \
  constexpr name##2 make_##name##2(T a) { return a; }                                   \
  constexpr name##3 make_##name##3(T a) { return a; }                                   \
  constexpr name##4 make_##name##4(T a) { return a; }                                   \
  constexpr name##2 make_##name##2(T a, T b) { return name##2 {a, b}; }                 \
  constexpr name##3 make_##name##3(T a, T b, T c) { return name##3 {a, b, c}; }         \
  constexpr name##4 make_##name##4(T a, T b, T c, T d) { return name##4 {a, b, c, d}; } \
  name##3 make_##name##3(name##2, T);                                                   \
  name##3 make_##name##3(T, name##2);                                                   \
  name##4 make_##name##4(name##2, name##2);                                             \
  name##4 make_##name##4(name##3, T);                                                   \
  name##4 make_##name##4(T, name##3);                                                   \
  name##4 make_##name##4(name##2, T, T);                                                \
  name##2 make_##name##2(name##2);                                                      \
  name##3 make_##name##3(name##3);                                                      \
  name##4 make_##name##4(name##4);

// 2.1 Scalar Data Types, 2.2 Vector Data Types
namespace metal {
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef long ptrdiff_t;

template <typename T, int N>
struct vector_of;
template <typename T, int N>
using vec = typename vector_of<T, N>::type;

FORGE_VECTORS(char, char)
FORGE_VECTORS(uchar, uchar)
FORGE_VECTORS(short, short)
FORGE_VECTORS(ushort, ushort)
FORGE_VECTORS(int, int)
FORGE_VECTORS(uint, uint)
FORGE_VECTORS(long, long)
FORGE_VECTORS(ulong, ulong)
FORGE_VECTORS(half, half)
FORGE_VECTORS(float, float)
}  // namespace metal

#define FORGE_ON_VECTORS(M, name) M(name##2) M(name##3) M(name##4)
#define FORGE_FLOATS(M) M(float) M(half) FORGE_ON_VECTORS(M, float) FORGE_ON_VECTORS(M, half)
#define FORGE_INTEGER_SCALARS(M) M(char) M(uchar) M(short) M(ushort) M(int) M(uint) M(long) M(ulong)
#define FORGE_INTEGERS(M)   \
  FORGE_INTEGER_SCALARS(M)  \
  FORGE_ON_VECTORS(M, int)  \
  FORGE_ON_VECTORS(M, uint) \
  FORGE_ON_VECTORS(M, ushort) FORGE_ON_VECTORS(M, long) FORGE_ON_VECTORS(M, ulong)
// 6.9.2: what moves between the threads of a SIMD-group is at most 32 bits wide and not bool.
#define FORGE_SIMD_INTEGERS(M) \
  M(char)                      \
  M(uchar)                     \
  M(short)                     \
  M(ushort)                    \
  M(int) M(uint) FORGE_ON_VECTORS(M, int) FORGE_ON_VECTORS(M, uint) FORGE_ON_VECTORS(M, ushort)

namespace metal {
// 6.2 Common Functions, 6.3 Integer Functions
#define FORGE_DECLARE(T) \
  T min(T, T);           \
  T max(T, T);           \
  T clamp(T, T, T);      \
  T abs(T);              \
  T select(T, T, bool);
FORGE_FLOATS(FORGE_DECLARE)
FORGE_INTEGERS(FORGE_DECLARE)
#undef FORGE_DECLARE
#define FORGE_DECLARE(T) \
  T popcount(T);         \
  T clz(T);              \
  T ctz(T);              \
  T mulhi(T, T);         \
  T addsat(T, T);        \
  T subsat(T, T);        \
  T rotate(T, T);        \
  T reverse_bits(T);
FORGE_INTEGERS(FORGE_DECLARE)
#undef FORGE_DECLARE

// 6.4 Relational Functions; those on vectors give bool vectors and are not declared.
#define FORGE_DECLARE(T) \
  bool isnan(T);         \
  bool isinf(T);         \
  bool isfinite(T);      \
  bool isnormal(T);      \
  bool signbit(T);
FORGE_DECLARE(float)
FORGE_DECLARE(half)
#undef FORGE_DECLARE

// 6.5 Math Functions
#define FORGE_MATH(T) \
  T acos(T);          \
  T asin(T);          \
  T atan(T);          \
  T atan2(T, T);      \
  T ceil(T);          \
  T copysign(T, T);   \
  T cos(T);           \
  T cosh(T);          \
  T exp(T);           \
  T exp2(T);          \
  T exp10(T);         \
  T fabs(T);          \
  T fdim(T, T);       \
  T floor(T);         \
  T fmax(T, T);       \
  T fmin(T, T);       \
  T fmod(T, T);       \
  T fract(T);         \
  T log(T);           \
  T log2(T);          \
  T log10(T);         \
  T pow(T, T);        \
  T powr(T, T);       \
  T rint(T);          \
  T round(T);         \
  T rsqrt(T);         \
  T sin(T);           \
  T sinh(T);          \
  T sqrt(T);          \
  T tan(T);           \
  T tanh(T);          \
  T trunc(T);
#define FORGE_DECLARE(T) \
  T fma(T, T, T);        \
  T mix(T, T, T);        \
  T saturate(T);         \
  T sign(T);             \
  T step(T, T);
FORGE_FLOATS(FORGE_MATH)
FORGE_FLOATS(FORGE_DECLARE)
#undef FORGE_DECLARE
float ldexp(float, int);
half ldexp(half, int);
namespace precise {
FORGE_MATH(float) FORGE_ON_VECTORS(FORGE_MATH, float)
}
namespace fast {
FORGE_MATH(float) FORGE_ON_VECTORS(FORGE_MATH, float)
}

// 6.8 Geometric Functions
#define FORGE_DECLARE(T)   \
  float dot(T, T);         \
  float length(T);         \
  float length_squared(T); \
  float distance(T, T);    \
  T normalize(T);
FORGE_ON_VECTORS(FORGE_DECLARE, float)
#undef FORGE_DECLARE
float3 cross(float3, float3);

// 6.9.1 Threadgroup and SIMD-Group Synchronization Functions
enum class mem_flags {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16,
};
mem_flags operator|(mem_flags, mem_flags);
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

// 6.9.2 SIMD-Group Functions
#define FORGE_DECLARE(T)                      \
  T simd_broadcast(T, ushort);                \
  T simd_broadcast_first(T);                  \
  T simd_shuffle(T, ushort);                  \
  T simd_shuffle_xor(T, ushort);              \
  T simd_shuffle_up(T, ushort);               \
  T simd_shuffle_down(T, ushort);             \
  T simd_shuffle_rotate_up(T, ushort);        \
  T simd_shuffle_rotate_down(T, ushort);      \
  T simd_shuffle_and_fill_up(T, T, ushort);   \
  T simd_shuffle_and_fill_down(T, T, ushort); \
  T simd_sum(T);                              \
  T simd_product(T);                          \
  T simd_min(T);                              \
  T simd_max(T);                              \
  T simd_prefix_inclusive_sum(T);             \
  T simd_prefix_exclusive_sum(T);             \
  T quad_broadcast(T, ushort);                \
  T quad_shuffle(T, ushort);                  \
  T quad_shuffle_xor(T, ushort);              \
  T quad_sum(T);                              \
  T quad_max(T);                              \
  T quad_min(T);
FORGE_FLOATS(FORGE_DECLARE)
FORGE_SIMD_INTEGERS(FORGE_DECLARE)
#undef FORGE_DECLARE
#define FORGE_DECLARE(T) \
  T simd_and(T);         \
  T simd_or(T);          \
  T simd_xor(T);
FORGE_SIMD_INTEGERS(FORGE_DECLARE)
#undef FORGE_DECLARE
bool simd_all(bool);
bool simd_any(bool);
bool simd_is_first();
struct simd_vote {
  typedef ulong vote_t;
  explicit operator vote_t() const;
  bool all() const;
  bool any() const;
};
simd_vote simd_ballot(bool);
simd_vote simd_active_threads_mask();

// 2.4 SIMD-group Matrix Data Types, 6.7 SIMD-Group Matrix Functions. thread_elements() is in
// Apple's header but not in the specification.
template <typename T, int Cols, int Rows>
struct simdgroup_matrix {
  static_assert(Cols == 8 && Rows == 8,
                "MSL 2.4 SIMD-group Matrix Data Types | a SIMD-group matrix is 8 x 8");
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
  __private vec<T, 2>& thread_elements() __private;
  vec<T, 2> lane;
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;

template <typename T, int Cols, int Rows = Cols>
simdgroup_matrix<T, Cols, Rows> make_filled_simdgroup_matrix(T);
#define FORGE_DECLARE(space)                                                                     \
  template <typename T, int Cols, int Rows>                                                      \
  void simdgroup_load(__private simdgroup_matrix<T, Cols, Rows>&, const space T*,                \
                      ulong elements_per_row = Cols, ulong2 matrix_origin = ulong2{0, 0},        \
                      bool transpose_matrix = false);                                            \
  template <typename T, int Cols, int Rows>                                                      \
  void simdgroup_store(simdgroup_matrix<T, Cols, Rows>, space T*, ulong elements_per_row = Cols, \
                       ulong2 matrix_origin = ulong2{0, 0}, bool transpose_matrix = false);
FORGE_DECLARE(__local)
FORGE_DECLARE(__global)
#undef FORGE_DECLARE
template <typename R, typename T, typename U, int K, int Cols, int Rows>
void simdgroup_multiply(__private simdgroup_matrix<R, Cols, Rows>&, simdgroup_matrix<T, K, Rows>,
                        simdgroup_matrix<U, Cols, K>);
template <typename R, typename T, typename U, typename V, int K, int Cols, int Rows>
void simdgroup_multiply_accumulate(__private simdgroup_matrix<R, Cols, Rows>&,
                                   simdgroup_matrix<T, K, Rows>, simdgroup_matrix<U, Cols, K>,
                                   simdgroup_matrix<V, Cols, Rows>);

// 6.1 Namespace and Header Files: metal_limits, metal_type_traits
template <typename T>
struct numeric_limits {
  static constexpr T min() { return T(); }
  static constexpr T max() { return T(); }
  static constexpr T lowest() { return T(); }
  static constexpr T epsilon() { return T(); }
  static constexpr T infinity() { return T(); }
  static constexpr T quiet_NaN() { return T(); }
};
template <typename T, typename U>
struct is_same {
  static constexpr __constant bool value = false;
};
template <typename T>
struct is_same<T, T> {
  static constexpr __constant bool value = true;
};
template <bool condition, typename T, typename U>
struct conditional {
  typedef T type;
};
template <typename T, typename U>
struct conditional<false, T, U> {
  typedef U type;
};
template <bool condition, typename T, typename U>
using conditional_t = typename conditional<condition, T, U>::type;
template <bool condition, typename T = void>
struct enable_if {};
template <typename T>
struct enable_if<true, T> {
  typedef T type;
};
template <bool condition, typename T = void>
using enable_if_t = typename enable_if<condition, T>::type;
}  // namespace metal

// Types that shaders here do not use. Their names are taken all the same.
namespace metal {
template <typename T, unsigned long N>
struct array;
template <typename T, int Cols, int Rows>
struct matrix;
template <typename T>
struct atomic;
template <typename T>
struct uniform;
struct sampler;
struct ray;
struct bias;
struct level;
}  // namespace metal

// 2.21 Type Conversions and Reinterpreting Data. Whoever runs the text brings a body.
#ifndef FORGE_AS_TYPE
#define FORGE_AS_TYPE(To, from) \
  (void)from;                   \
  return To();
#endif
template <typename To, typename From>
To as_type(From from) {
  static_assert(
      sizeof(To) == sizeof(From),
      "MSL 2.21 Type Conversions and Reinterpreting Data | as_type needs types of one size");
  FORGE_AS_TYPE(To, from)
}
// 5.8.1 Specifying Program Scope Function Constants
template <typename T>
bool is_function_constant_defined(T);

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define HUGE_VALF __builtin_huge_valf()
#define MAXFLOAT 0x1.fffffep+127f
#define FLT_MAX 0x1.fffffep+127f
#define FLT_MIN 0x1p-126f
#define FLT_EPSILON 0x1p-23f
#define INT_MAX 2147483647
#define INT_MIN (-2147483647 - 1)
#define UINT_MAX 4294967295u
#define M_E_F 2.71828175f
#define M_LOG2E_F 1.44269502f
#define M_LN2_F 0.693147182f
#define M_PI_F 3.14159274f
