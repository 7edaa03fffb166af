// The part of the Metal shading language that the shaders use, in CUDA C++. A simdgroup is a warp,
// a threadgroup is a block; simdgroup matrices lie over the lanes as on Apple GPUs.
#pragma once

#include <cuda_fp16.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

typedef unsigned char uchar;
typedef unsigned int uint;
typedef unsigned short ushort;

#define __METAL_VERSION__ 310
#define METAL_FUNCTION static __host__ __device__ inline
#define METAL_DEVICE_FUNCTION static __device__ inline
#define METAL_FUNC static __device__ __forceinline__

template <typename To, typename From>
METAL_FUNCTION To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

namespace metal {

struct alignas(8) float2 {
  float x;
  float y;
  float2() = default;
  __host__ __device__ float2(float first, float second) : x(first), y(second) {}
};

struct alignas(16) float4 {
  float x;
  float y;
  float z;
  float w;
  float4() = default;
  __host__ __device__ float4(float first, float second, float third, float fourth)
      : x(first), y(second), z(third), w(fourth) {}
};

struct alignas(8) ushort4 {
  ushort x;
  ushort y;
  ushort z;
  ushort w;
  ushort4() = default;
  __host__ __device__ ushort4(ushort first, ushort second, ushort third, ushort fourth)
      : x(first), y(second), z(third), w(fourth) {}
};

METAL_FUNCTION float4 operator+(float4 a, float4 b) {
  return float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

METAL_FUNCTION float2 operator+(float2 a, float2 b) { return float2(a.x + b.x, a.y + b.y); }
METAL_FUNCTION float2 operator-(float2 a, float b) { return float2(a.x - b, a.y - b); }
METAL_FUNCTION float2 operator-(float2 a) { return float2(-a.x, -a.y); }
METAL_FUNCTION float2 operator*(float2 a, float2 b) { return float2(a.x * b.x, a.y * b.y); }
METAL_FUNCTION float2 operator*(float2 a, float b) { return float2(a.x * b, a.y * b); }
METAL_FUNCTION float2 operator*(float a, float2 b) { return b * a; }
METAL_FUNCTION float2& operator+=(float2& a, float2 b) { return a = a + b; }

METAL_FUNCTION float fma(float a, float b, float c) { return ::fmaf(a, b, c); }
METAL_FUNCTION float2 fma(float2 a, float2 b, float2 c) {
  return float2(::fmaf(a.x, b.x, c.x), ::fmaf(a.y, b.y, c.y));
}
METAL_FUNCTION float exp2(float x) { return ::exp2f(x); }

constexpr unsigned kAllLanes = 0xffffffffu;

template <typename T>
METAL_DEVICE_FUNCTION T simd_shuffle(T x, ushort lane) {
  return __shfl_sync(kAllLanes, x, lane);
}
template <typename T>
METAL_DEVICE_FUNCTION T simd_shuffle_xor(T x, ushort mask) {
  return __shfl_xor_sync(kAllLanes, x, mask);
}
METAL_DEVICE_FUNCTION bool simd_all(bool x) { return __all_sync(kAllLanes, x) != 0; }

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
METAL_DEVICE_FUNCTION void threadgroup_barrier(mem_flags) { __syncthreads(); }

// Lane l has row ((l / 4) & 4) + (l / 2) % 4 and columns 2 * (((l / 4) & 2) + l % 2) and the next.
struct simdgroup_float8x8 {
  float elements[2];
  __device__ float* thread_elements() { return elements; }
};

METAL_DEVICE_FUNCTION unsigned lane_of(unsigned row, unsigned column) {
  return ((row & 4) << 2) | ((row & 3) << 1) | ((column & 4) << 1) | ((column & 2) >> 1);
}

// d = a b + c: each element one fma chain over ascending k, from that of c.
METAL_DEVICE_FUNCTION void simdgroup_multiply_accumulate(simdgroup_float8x8& d,
                                                         simdgroup_float8x8 a, simdgroup_float8x8 b,
                                                         simdgroup_float8x8 c) {
  const unsigned lane = threadIdx.x % 32;
  const unsigned row = ((lane / 4) & 4) + (lane / 2) % 4;
  const unsigned column = 2 * (((lane / 4) & 2) + lane % 2);
  float x = c.elements[0];
  float y = c.elements[1];
#pragma unroll
  for (unsigned k = 0; k < 8; ++k) {
    const float left = __shfl_sync(kAllLanes, a.elements[k % 2], lane_of(row, k));
    x = ::fmaf(left, __shfl_sync(kAllLanes, b.elements[0], lane_of(k, column)), x);
    y = ::fmaf(left, __shfl_sync(kAllLanes, b.elements[1], lane_of(k, column)), y);
  }
  d.elements[0] = x;
  d.elements[1] = y;
}

}  // namespace metal

// CUDA's own vectors have neither constructors nor arithmetic.
#define float2 ::metal::float2
#define float4 ::metal::float4
#define ushort4 ::metal::ushort4
