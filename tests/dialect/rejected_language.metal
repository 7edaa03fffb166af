// What Apple's compiler refuses, or what we do not write (rules that begin with "forge:"):
// what the language and its library leave out.
// Each piece begins with its name, then the rule and words of the message; "<-" marks the line it is
// found in. <metal_stdlib> and `using namespace metal` stand before each.

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

//// an argument of more than 128 bytes
//// forge: MSL 5.1 Functions: large (132 bytes)
struct Params { float x[33]; };
static float f(Params params) { return params.x[0]; }  // <-

//// a template's result of more than 128 bytes
//// forge: MSL 5.1 Functions: large (136 bytes)
template <int N>
struct Blocks { float2 at[N]; };
template <int N>
static Blocks<N> zeros(float x) {  // <-
  Blocks<N> blocks;
  for (int n = 0; n < N; ++n) blocks.at[n] = float2(x, x);
  return blocks;
}
kernel void k(device float* x [[buffer(0)]]) { x[0] = zeros<17>(x[1]).at[0].x; }

//// recursion
//// forge: MSL 1.5.4 Restrictions: calls itself
static int f(int x) { return x > 1 ? f(x / 2) : x; }  // <-

//// a string
//// forge: MSL 2.1 Scalar Data Types: string
static int f(int x) { return x + int(sizeof("abc")); }  // <-

//// a name of Metal's library, taken for ours and used with both namespaces open
//// MSL 6.1 Namespace and Header Files: ambiguous
namespace forge {
struct array { float x[4]; };
}
using namespace forge;
static float f(array a) { return a.x[0]; }  // <-
