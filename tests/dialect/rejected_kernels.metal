// What Apple's compiler refuses, or what we do not write (rules that begin with "forge:"):
// kernels, their arguments, SIMD-group matrices.
// Each piece begins with its name, then the rule and words of the message; "<-" marks the line it is
// found in. <metal_stdlib> and `using namespace metal` stand before each.

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
kernel void k(device int* x [[buffer(0)]], uint3 i [[thread_index_in_simdgroup]]) {  // <-
  x[i.x] = 1;
}

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
