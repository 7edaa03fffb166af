// What Apple's compiler refuses, or what we do not write (rules that begin with "forge:"):
// address spaces.
// Each piece begins with its name, then the rule and words of the message; "<-" marks the line it is
// found in. <metal_stdlib> and `using namespace metal` stand before each.

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
