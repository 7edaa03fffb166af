// What Apple's compiler refuses, or what we do not write (rules that begin with "forge:"). Each piece
// begins with its name, the rule, and words of the message; "<-" marks the line it is found in.
// <metal_stdlib> and `using namespace metal` stand before each.

//// a pointer parameter without an address space
//// MSL 4 Address Spaces: must name its address space
static float first(const float* x) { return x[0]; }  // <-

//// a reference parameter without an address space
//// MSL 4 Address Spaces: must name its address space
template <typename T>
static void reset(T& x) { x = T(0); }  // <-

//// a pointer variable without an address space
//// MSL 4 Address Spaces: must name its address space
kernel void k(device float* x [[buffer(0)]]) {
  float local[2] = {x[0], x[1]};
  float* p = local;  // <-
  x[0] = p[1];
}

//// a pointer member without an address space
//// MSL 4 Address Spaces: must name its address space
struct Rows {
  const float* first;  // <-
};

//// an array parameter, which is a pointer
//// MSL 4 Address Spaces: array parameter
static float sum(float x[4]) { return x[0] + x[1] + x[2] + x[3]; }  // <-

//// auto by reference without an address space
//// MSL 4 Address Spaces: explicit address space
kernel void k(device float* x [[buffer(0)]]) {
  auto& y = x[0];  // <-
  y = 1.0f;
}

//// a cast to a pointer without an address space
//// MSL 4 Address Spaces: cast
kernel void k(device float* x [[buffer(0)]]) {
  x[0] = float(*(int*)(x + 1));  // <-
}

//// device memory handed to a function for threadgroup memory
//// MSL 4 Address Spaces: no matching function
static void clear(threadgroup float* tile) { tile[0] = 0.0f; }
kernel void k(device float* x [[buffer(0)]]) {
  clear(x);  // <-
}

//// constant memory handed to a function for device memory
//// MSL 4 Address Spaces: no matching function
struct Sizes { int rows; };
static int rows(device const Sizes& sizes) { return sizes.rows; }
kernel void k(constant Sizes& sizes [[buffer(0)]], device int* x [[buffer(1)]]) {
  x[0] = rows(sizes);  // <-
}

//// one address space assigned to another
//// MSL 4 Address Spaces: changes address space
kernel void k(device float* x [[buffer(0)]]) {
  threadgroup float tile[4];
  threadgroup float* p = tile;
  p = x;  // <-
  x[0] = p[0];
}

//// a cast from one address space to another
//// MSL 4 Address Spaces: address space
kernel void k(device float* x [[buffer(0)]]) {
  threadgroup float* tile = (threadgroup float*)x;  // <-
  tile[0] = 1.0f;
}

//// a method, which is for thread memory, on device memory
//// MSL 4 Address Spaces: copy it first
struct Range {
  int lo, hi;
  int length() const { return hi - lo; }
};
kernel void k(device const Range* ranges [[buffer(0)]], device int* x [[buffer(1)]]) {
  x[0] = ranges[0].length();  // <-
}

//// a method, which is for thread memory, on constant memory
//// MSL 4 Address Spaces: object parameter
struct Range {
  int lo, hi;
  int length() const { return hi - lo; }
};
kernel void k(constant Range& range [[buffer(0)]], device int* x [[buffer(1)]]) {
  x[0] = range.length();  // <-
}

//// a variable at program scope that is not constant
//// MSL 4.2 Constant Address Space: must be constant
static const int width = 32;  // <-

//// constexpr at program scope, which is not constant memory either
//// MSL 4.2 Constant Address Space: must be constant
constexpr int width = 32;  // <-

//// a static member that is not constant
//// MSL 4.2 Constant Address Space: must be constant
struct Tile {
  static constexpr int kRows = 8;  // <-
};

//// a constant without a value
//// MSL 4.2 Constant Address Space: must be initialized
constant float scale;  // <-

//// a constant whose value is computed
//// MSL 4.2 Constant Address Space: global constructor
static float half_of(float x) { return x * 0.5f; }
constant float scale = half_of(3.0f);  // <-

//// writing to constant memory
//// MSL 4.2 Constant Address Space: not assignable
kernel void k(constant float* x [[buffer(0)]]) {
  x[0] = 1.0f;  // <-
}

//// threadgroup memory in a function that is no kernel
//// MSL 4.4 Threadgroup Address Space: no kernel
static float shared_sum(float x) {
  threadgroup float tile[32];  // <-
  tile[0] = x;
  return tile[0];
}

//// threadgroup memory that is initialised
//// MSL 4.4 Threadgroup Address Space: is initialised
kernel void k(device float* x [[buffer(0)]]) {
  threadgroup float tile[2] = {0.0f, 0.0f};  // <-
  x[0] = tile[0];
}

//// threadgroup memory at program scope
//// MSL 4.2 Constant Address Space: must be constant
threadgroup float tile[32];  // <-

//// a function of the C++ standard library
//// MSL 1.5.4 Restrictions: standard library
static float root(float x) { return std::sqrt(x); }  // <-

//// a header of the C++ standard library
//// MSL 1.5.4 Restrictions: file not found
#include <cmath>  // <-

//// a function of C
//// MSL 6.1 Namespace and Header Files: printf
kernel void k(device float* x [[buffer(0)]]) {
  x[0] = printf(1);  // <-
}

//// a function that only OpenCL has
//// MSL 6.1 Namespace and Header Files: get_global_id
kernel void k(device float* x [[buffer(0)]]) {
  x[get_global_id(0)] = 1.0f;  // <-
}

//// a function that Metal's library does not have
//// MSL 6.1 Namespace and Header Files: expm1
static float f(float x) { return metal::expm1(x); }  // <-

//// max of int and uint
//// MSL 6.2 Common Functions: ambiguous
static uint f(uint x) { return max(x, 1); }  // <-

//// min of float and int
//// MSL 6.2 Common Functions: ambiguous
static float f(float x) { return min(x, 0); }  // <-

//// max of long and int
//// MSL 6.2 Common Functions: ambiguous
static long f(long x) { return max(x, 0); }  // <-

//// one vector type for another
//// MSL 2.22 Implicit Type Conversions: float4
static float4 f(int4 x) { float4 y = x; return y; }  // <-

//// as_type between types of two sizes
//// MSL 2.21 Type Conversions and Reinterpreting Data: one size
kernel void k(device float* x [[buffer(0)]]) {
  x[0] = as_type<float>(1l);  // <-
}

//// double
//// MSL 2.1 Scalar Data Types: no double
static float f(float x) { double y = x; return float(y); }  // <-

//// long double
//// MSL 2.1 Scalar Data Types: no long double
static float f(float x) { return float((long double)x); }  // <-

//// long long
//// MSL 2.1 Scalar Data Types: no long long
static int f(int x) { long long y = x; return int(y); }  // <-

//// a literal that is a double in C++
//// forge: MSL 2.1 Scalar Data Types: write 0.5f
static float f(float x) { return x * 0.5; }  // <-

//// half as a name
//// MSL 1.5 (C++14): unqualified-id
static int f(int x) { int half = x >> 1; return x; }  // <-

//// uint without Metal's namespace
//// MSL 6.1 Namespace and Header Files: uint
#include <metal_stdlib>
static int f(uint x) { return int(x); }  // <-

//// a lambda expression
//// MSL 1.5.4 Restrictions: lambda
kernel void k(device float* x [[buffer(0)]]) {
  auto twice = [](float y) { return 2.0f * y; };  // <-
  x[0] = twice(x[0]);
}

//// dynamic_cast
//// MSL 1.5.4 Restrictions: dynamic_cast
struct A { int a; };
static int f(thread A& a) { return dynamic_cast<thread A&>(a).a; }  // <-

//// typeid
//// MSL 1.5.4 Restrictions: type identification
static bool f(int x) { return typeid(x) == typeid(int); }  // <-

//// new
//// MSL 1.5.4 Restrictions: operator new
static int f(int x) { return *new int(x); }  // <-

//// goto
//// MSL 1.5.4 Restrictions: goto
static int f(int x) {
again:
  x = x / 2;
  if (x > 3) goto again;  // <-
  return x;
}

//// a virtual function
//// MSL 1.5.4 Restrictions: virtual
struct Kernel {
  virtual int rows() const { return 1; }  // <-
};

//// a derived class
//// MSL 1.5.4 Restrictions: derived
struct Base { int a; };
struct Tile : Base { int b; };  // <-

//// an exception
//// MSL 1.5.4 Restrictions: exception
static int f(int x) {
  if (x < 0) throw x;  // <-
  return x;
}

//// noexcept
//// MSL 1.5.4 Restrictions: noexcept
static int f(int x) noexcept { return x; }  // <-

//// thread_local
//// MSL 1.5.4 Restrictions: thread_local
static int f(int x) { thread_local int y = x; return y; }  // <-

//// register
//// MSL 1.5.4 Restrictions: register
static int f(int x) { register int y = x; return y; }  // <-

//// a static variable in a function
//// MSL 5.3 Storage Class Specifiers: static
static int f(int x) {
  static int calls = 0;  // <-
  return x + ++calls;
}

//// inline assembly
//// MSL 1.5 (C++14): assembly
static void f() { asm("nop"); }  // <-

//// an array of variable length
//// MSL 1.5 (C++14, arrays and constant expressions): array
kernel void k(device float* x [[buffer(0)]], constant int& n [[buffer(1)]]) {
  float copy[n];  // <-
  copy[0] = x[0];
}

//// an array as long as a function constant says
//// MSL 1.5 (C++14, arrays and constant expressions): array
constant int width [[function_constant(0)]];
kernel void k(device float* x [[buffer(0)]]) {
  float copy[width];  // <-
  copy[0] = x[0];
}

//// if constexpr, which is C++17
//// MSL 1.5 (C++14 before Metal 4): constexpr if
template <int D>
static int f(int x) {
  if constexpr (D > 1) return x;  // <-
  return D;
}

//// nested namespaces in one go, which is C++17
//// MSL 1.5 (C++14 before Metal 4): nested namespace
namespace forge::tiles {  // <-
}

//// a pointer to a function
//// forge: MSL 1.5.4 Restrictions: pointers to functions
static int f(int (*g)(int)) { return g(1); }  // <-

//// a variadic function
//// forge: MSL 5.1 Functions: variadic
static int f(int n, ...) { return n; }  // <-

//// recursion
//// forge: MSL 1.5.4 Restrictions: calls itself
static int f(int x) { return x > 1 ? f(x / 2) : x; }  // <-

//// a string
//// forge: MSL 2.1 Scalar Data Types: string
static int f(int x) { return x + int(sizeof("abc")); }  // <-

//// a kernel that returns something
//// MSL 5.1.3 Compute Functions (Kernels): must return void
kernel int k(device int* x [[buffer(0)]]) { return x[0]; }  // <-

//// a kernel that calls a kernel
//// MSL 5.1 Functions: is called
kernel void one(device int* x [[buffer(0)]]) { x[0] = 1; }
kernel void two(device int* x [[buffer(0)]]) {
  one(x);  // <-
}

//// two kernels of one name
//// MSL 1.5.1 Overloading: overloaded
kernel void k(device int* x [[buffer(0)]]) { x[0] = 1; }
kernel void k(device float* x [[buffer(0)]]) { x[0] = 1.0f; }  // <-

//// a kernel argument by value
//// MSL 5.2.3.6 Kernel Function Input Attributes: by value
kernel void k(device int* x [[buffer(0)]],
              int n) {  // <-
  x[0] = n;
}

//// a kernel argument without its index
//// forge: MSL 5.2.1 Locating Buffer, Texture, and Sampler Arguments: needs [[buffer(n)]]
kernel void k(device int* x) { x[0] = 1; }  // <-

//// a kernel argument without an address space
//// MSL 1.5.4 Restrictions: must name its address space
kernel void k(float* x [[buffer(0)]]) { x[0] = 1.0f; }  // <-

//// a kernel argument in thread memory
//// MSL 1.5.4 Restrictions: thread address space
kernel void k(thread int* x [[buffer(0)]]) { x[0] = 1; }  // <-

//// two kernel arguments of one index
//// MSL 5.2.1 Locating Buffer, Texture, and Sampler Arguments: are equal
enum Slot { kIn = 3, kOut = 3 };
kernel void k(device const int* x [[buffer(kIn)]], device int* y [[buffer(kOut)]]) {
  y[0] = x[0];
}  // <-

//// an index beyond the argument table
//// MSL 5.2.1 Locating Buffer, Texture, and Sampler Arguments: from 0 to 30
kernel void k(device int* x [[buffer(31)]]) { x[0] = 1; }  // <-

//// an attribute that is spelled wrongly
//// MSL 5.1 and 5.2, attributes of functions and arguments: thread_position_in_gird
kernel void k(device int* x [[buffer(0)]], uint i [[thread_position_in_grid]],
              uint j [[thread_position_in_gird]]) {  // <-
  x[i] = int(j);
}

//// a built-in input of a type it cannot have
//// MSL 5.2.3.6 Kernel Function Input Attributes: cannot be a int
kernel void k(device int* x [[buffer(0)]], int i [[thread_position_in_grid]]) { x[i] = 1; }  // <-

//// a lane number of three components
//// MSL 5.2.3.6 Kernel Function Input Attributes: cannot be a uint3
kernel void k(device int* x [[buffer(0)]], uint3 i [[thread_index_in_simdgroup]]) { x[i.x] = 1; }  // <-

//// a condition that is no function constant
//// MSL 5.8.1 Specifying Program Scope Function Constants: no function constant
constant bool has_bias = true;
kernel void k(device int* x [[buffer(0)]],
              device int* bias [[buffer(1), function_constant(has_bias)]]) {  // <-
  x[0] = bias[0];
}

//// two function constants of one id
//// MSL 5.8.1 Specifying Program Scope Function Constants: are equal
constant bool a [[function_constant(1)]];
constant bool b [[function_constant(1)]];  // <-

//// two kernels of one host name
//// MSL 5.1.10 Host Name Attribute: another kernel
template <int D>
kernel void k(device int* x [[buffer(0)]]) { x[0] = D; }
template [[host_name("k_1")]] [[kernel]] decltype(k<1>) k<1>;
template [[host_name("k_1")]] [[kernel]] decltype(k<2>) k<2>;  // <-

//// a SIMD-group matrix of another size
//// MSL 2.4: 8 x 8
kernel void k(device float* x [[buffer(0)]]) {
  simdgroup_matrix<float, 16, 16> m;  // <-
  simdgroup_load(m, x);
}

//// a SIMD-group matrix loaded from thread memory
//// MSL 4 Address Spaces, 6 Metal Standard Library: simdgroup_load
kernel void k(device float* x [[buffer(0)]]) {
  float tile[64];
  for (int i = 0; i < 64; ++i) tile[i] = x[i];
  simdgroup_float8x8 m;
  simdgroup_load(m, tile);  // <-
  simdgroup_store(m, x);
}

//// a SIMD-group matrix stored to constant memory
//// MSL 4 Address Spaces, 6 Metal Standard Library: simdgroup_store
kernel void k(constant float* x [[buffer(0)]]) {
  simdgroup_float8x8 m = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
  simdgroup_store(m, x);  // <-
}

//// an asynchronous copy
//// MSL 6.7 SIMD-Group Matrix Functions: not in the specification
kernel void k(device float* x [[buffer(0)]]) {
  threadgroup float tile[64];
  simdgroup_async_copy(tile, x, 64);  // <-
}

//// a shuffle of 64 bits
//// MSL 6.2 Common Functions: ambiguous
static long f(long x) { return simd_shuffle_xor(x, 1); }  // <-

//// a barrier without flags
//// MSL 4 Address Spaces, 6 Metal Standard Library: threadgroup_barrier
static void f() { threadgroup_barrier(); }  // <-

//// a function called main
//// MSL 1.5.4 Restrictions: main
kernel void main(device int* x [[buffer(0)]]) { x[0] = 1; }  // <-
