// Valid Metal that the check takes without complaint. Each piece begins with its name;
// <metal_stdlib> and `using namespace metal` stand before each.

//// a helper for every address space
template <typename Pointer>
static float sum(Pointer x, int n) {
  float s = 0.0f;
  for (int i = 0; i < n; ++i) s += x[i];
  return s;
}
kernel void k(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
              constant float* z [[buffer(2)]]) {
  threadgroup float tile[4];
  float own[4] = {1.0f, 2.0f, 3.0f, 4.0f};
  tile[0] = x[0];
  y[0] = sum(x, 4) + sum(z, 4) + sum(&tile[0], 4) + sum(own, 4);
}

//// overloads by address space
static float first(device const float* x) { return x[0]; }
static float first(threadgroup const float* x) { return x[0]; }
static float first(constant float* x) { return x[0]; }
static float first(thread const float* x) { return x[0]; }
kernel void k(device float* x [[buffer(0)]], constant float* c [[buffer(1)]]) {
  threadgroup float tile[1];
  float own[1] = {2.0f};
  tile[0] = first(x);
  x[0] = first(&tile[0]) + first(c) + first(own);
}

//// references to thread memory
struct Tile { float x[4]; };
static void scale(thread Tile& tile, const thread float& factor) {
  for (thread float& x : tile.x) x *= factor;
}
kernel void k(device float* x [[buffer(0)]]) {
  Tile tile = {{x[0], x[1], x[2], x[3]}};
  float factor = 2.0f;
  scale(tile, factor);
  x[0] = tile.x[3];
}

//// structs by value from constant, device and threadgroup memory
struct Strides { long batch, row; };
struct Params { Strides q; int n; float scale; };
static float use(Params params) { return params.scale + float(params.q.row); }
kernel void k(constant Params& given [[buffer(0)]], device Params* all [[buffer(1)]],
              device float* y [[buffer(2)]]) {
  Params params = given;
  Params other = all[1];
  threadgroup Params shared;
  shared = given;
  other = given;
  all[0] = other;
  all[1] = all[0];
  all[2] = shared;
  Strides strides = given.q;
  y[0] = use(given) + use(all[2]) + float(strides.row) + params.scale;
}

//// a method on a copy, and one for constant memory
struct Range {
  int lo = 0;
  int hi = 0;
  int length() const { return hi - lo; }
  int first() const constant { return lo; }
};
kernel void k(constant Range& given [[buffer(0)]], device int* x [[buffer(1)]]) {
  Range range = given;
  x[0] = range.length() + given.first();
}

//// function constants, one made of others, and an argument that depends on one
constant bool has_softcap [[function_constant(0)]];
constant bool has_bias [[function_constant(1)]];
constant int width [[function_constant(2)]];
constant bool is_plain = !has_softcap && !has_bias;
constant int used_width = is_function_constant_defined(width) ? width : 32;
kernel void k(device float* x [[buffer(0)]],
              device const float* bias [[buffer(1), function_constant(has_bias)]]) {
  if (is_plain) x[0] = 1.0f;
  if (has_bias) x[1] = bias[used_width];
}

//// constants at program scope
constant float table[3] = {1.0f, 2.0f, 3.0f};
constexpr constant int kRows = 8;
static constant constexpr int kColumns = kRows * 2;
struct Shape { static constexpr constant int kTile = kRows * kColumns; };
static float lookup(constant float* from, int i) { return from[i]; }
kernel void k(device float* x [[buffer(0)]]) {
  float own[Shape::kTile];
  own[0] = lookup(table, 1);
  x[0] = own[0];
}

//// a template of kernels and its instantiations
template <int D>
kernel void copy(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                 uint i [[thread_position_in_grid]]) {
  threadgroup float tile[D];
  tile[i % D] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float* row = tile;
  y[i] = row[(i + 1) % D];
}
template [[host_name("copy_64")]] [[kernel]] decltype(copy<64>) copy<64>;
template [[host_name("copy_128")]] [[kernel]] decltype(copy<128>) copy<128>;

//// a kernel marked by its attribute, with the size of its threadgroups
template <typename T, int N>
[[kernel, max_total_threads_per_threadgroup(N * 32)]] void fill(device T* x [[buffer(0)]],
                                                                uint i
                                                                [[thread_position_in_grid]]) {
  x[i] = T(N);
}
template [[host_name("fill")]] [[kernel]] decltype(fill<float, 4>) fill<float, 4>;

//// the inputs of a kernel
kernel void k(device uint* x [[buffer(0)]], uint3 at [[thread_position_in_grid]],
              ushort2 in_group [[thread_position_in_threadgroup]],
              uint group [[threadgroup_position_in_grid]],
              ushort lane [[thread_index_in_simdgroup]],
              uint simdgroup [[simdgroup_index_in_threadgroup]],
              uint index [[thread_index_in_threadgroup]],
              uint3 size [[threads_per_threadgroup]]) {
  x[at.x] = in_group.y + group + lane + simdgroup + index + size.z;
}

//// threadgroup memory whose size the host sets
kernel void k(device float* x [[buffer(0)]], threadgroup float* tile [[threadgroup(0)]],
              uint i [[thread_index_in_threadgroup]]) {
  tile[i] = x[i];
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  x[i] = tile[i ^ 1];
}

//// SIMD-group matrices
kernel void k(device const float* a [[buffer(0)]], device const float* b [[buffer(1)]],
              device float* c [[buffer(2)]]) {
  threadgroup float tile[64];
  simdgroup_float8x8 left;
  simdgroup_matrix<float, 8, 8> right;
  simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_load(left, a, 8);
  simdgroup_load(right, b, 16, ulong2(8, 0), true);
  simdgroup_multiply_accumulate(sum, left, right, sum);
  simdgroup_multiply(sum, left, sum);
  simdgroup_store(sum, tile);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_load(sum, tile, 8, ulong2(0, 0), false);
  sum.thread_elements()[0] *= 2.0f;
  thread auto& elements = sum.thread_elements();
  elements[1] = elements[0];
  simdgroup_store(sum, c, 8);
}

//// half operands, float accumulator
kernel void k(device const half* a [[buffer(0)]], device float* c [[buffer(1)]]) {
  simdgroup_half8x8 left;
  simdgroup_float8x8 sum(0.0f);
  simdgroup_load(left, a);
  simdgroup_multiply_accumulate(sum, left, left, sum);
  simdgroup_store(sum, c);
}

//// SIMD-group functions
static float row_max(float x) {
  x = max(x, simd_shuffle_xor(x, 1));
  x = max(x, simd_shuffle_xor(x, ushort(8)));
  return simd_any(isnan(x)) ? NAN : simd_max(x) + simd_sum(x) + simd_broadcast(x, 0);
}

//// vectors: constructors, swizzles, arithmetic, a name for one
typedef float2 Pair;
using Quad = metal::float4;
static float4 f(float x, Pair pair) {
  float4 y = float4(1.0f, x, 2.0f, 3.0f);
  y = float4(pair, y.zw) * 2.0f + y.wzyx + x;
  y.xy += Pair(x, 1.0f);
  return Quad(y.xyz, dot(pair, pair)) + metal::float4(int4(1)[0]);
}

//// max and min of one type
static long f(long x, int n, uint m) { return max(x, long(n)) + min(n, 0) + clamp(m, 0u, 7u); }

//// math, in its three precisions
static float f(float x) {
  return exp(x) + metal::precise::tanh(x) + fast::exp2(x) + fma(x, x, 1.0f) + fabs(-INFINITY);
}

//// bits
static float f(int bits) { return as_type<float>((bits + 127) << 23) + float(popcount(bits)); }

//// 64-bit integers
static long f(long x, ulong y) { return x * 0x100000000 + long(y >> 33) + 5l; }

//// C++14: auto, constexpr functions, enum class, static_assert, operators, variable templates
enum class Mode : int { kPlain, kSoftcap };
constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }
static_assert(round_up(5, 4) == 8, "rounds up");
struct Pair {
  float a, b;
};
static Pair operator+(Pair x, Pair y) { return {x.a + y.a, x.b + y.b}; }
static auto twice(Pair x) {
  auto y = x + x;
  return y;
}
template <typename T>
constexpr constant int kWidth = sizeof(T) * 8;
static float f(Mode mode) { return mode == Mode::kPlain ? twice({1.0f, 2.0f}).b : kWidth<float>; }

//// a pointer to a pointer, each with its space
static float f(device const float* thread* rows) { return rows[0][1]; }

//// an array by reference
static float f(thread const float (&x)[4]) { return x[3]; }

//// a template chosen by a type
template <typename T>
static enable_if_t<is_same<T, float>::value, T> one() {
  return T(1);
}
static float f() { return one<float>() + numeric_limits<float>::infinity(); }

//// a class with a constructor and default member values
class Counter {
 public:
  Counter(int start) : count_(start) {}
  void next() { ++count_; }
  int count() const { return count_; }

 private:
  int count_ = 0;
};
static int f() {
  Counter counter(3);
  counter.next();
  return counter.count();
}

//// names that mean something to OpenCL only
static int f(int global, int local) {
  int generic = global + local;
  int pipe = generic, event = pipe;
  return event;
}

//// a loop to be unrolled
static float f(thread const float* x) {
  float s = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) s += x[i];
  return s;
}

//// text for Metal's compiler only
#ifdef __METAL_VERSION__
#if __METAL_VERSION__ >= 310
static float f(float x) { return x; }
#endif
#else
#include <cmath>
static double f(double x) { return std::sqrt(x); }
#endif
