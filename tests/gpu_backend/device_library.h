// Bodies for Metal's library where a back end needs them, after the dialect check's declarations.
// What a GPU does in one instruction is one opaque operation on registers here.
#define FORGE_OPAQUE inline __attribute__((always_inline))

namespace metal {

template <>
FORGE_OPAQUE __private float2& simdgroup_matrix<float, 8, 8>::thread_elements() __private {
  return lane;
}
FORGE_OPAQUE void simdgroup_multiply_accumulate(__private simdgroup_float8x8& d,
                                                simdgroup_float8x8 a, simdgroup_float8x8 b,
                                                simdgroup_float8x8 c) {
  float2 result;
  __asm__("; PRODUCT %0, %1, %2, %3" : "=v"(result) : "v"(a.lane), "v"(b.lane), "v"(c.lane));
  d.lane = result;
}

FORGE_OPAQUE float fma(float a, float b, float c) {
  float result;
  __asm__("; FMA %0, %1, %2, %3" : "=v"(result) : "v"(a), "v"(b), "v"(c));
  return result;
}
FORGE_OPAQUE float2 fma(float2 a, float2 b, float2 c) {
  return float2{fma(a.x, b.x, c.x), fma(a.y, b.y, c.y)};
}
FORGE_OPAQUE float exp2(float x) {
  float result;
  __asm__("; EXP2 %0, %1" : "=v"(result) : "v"(x));
  return result;
}

FORGE_OPAQUE float simd_shuffle(float x, ushort lane) {
  float result;
  __asm__("; SHUFFLE %0, %1, %2" : "=v"(result) : "v"(x), "v"((int)lane));
  return result;
}
FORGE_OPAQUE int simd_shuffle(int x, ushort lane) {
  int result;
  __asm__("; SHUFFLE %0, %1, %2" : "=v"(result) : "v"(x), "v"((int)lane));
  return result;
}
FORGE_OPAQUE float simd_shuffle_xor(float x, ushort mask) {
  float result;
  __asm__("; SHUFFLE %0, %1, %2" : "=v"(result) : "v"(x), "s"((int)mask));
  return result;
}
FORGE_OPAQUE bool simd_all(bool x) {
  int result;
  __asm__("; ALL %0, %1" : "=v"(result) : "v"((int)x));
  return result;
}
FORGE_OPAQUE void threadgroup_barrier(mem_flags) { __asm__ volatile("; BARRIER" ::: "memory"); }

}  // namespace metal
