// Kernels that lean on what Metal leaves open, or that it forbids and no device reports.
#include <metal_stdlib>

using namespace metal;

// Right only where simdgroup 0 runs first: nothing orders what its threads store.
kernel void simdgroups_in_order(device float* out [[buffer(0)]],
                                uint t [[thread_index_in_threadgroup]]) {
  out[t] = t < 32 ? 1.0f : out[t - 32];
}

kernel void every_group_fails(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  out[i + 1000000] = 1.0f;
}

kernel void products_with(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
                          constant float& factor [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  out[i] = in[i] * factor;
}

// Device memory of several threadgroups

kernel void all_store_one(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  if (t == 0) out[5] = 1.0f;
}

kernel void stores_then_loads(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]],
                              uint size [[threads_per_grid]]) {
  out[i] = 1.0f;
  float other = out[(i + size - 64) % size];
  out[i] = other;
}

kernel void loads_then_stores(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  out[i] = out[i + 32] + 1.0f;
}

kernel void halves_in_one_word(device short* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  out[i] = short(i);
}

// One line of a function, reached by several ways

static inline float neighbour(float x) { return simd_shuffle_xor(x, 1); }

static inline void meet() { threadgroup_barrier(mem_flags::mem_threadgroup); }

kernel void by_two_branches(device float* out [[buffer(0)]], constant uint& width [[buffer(1)]],
                            uint t [[thread_index_in_threadgroup]]) {
  float x;
  if (t / width % 2 == 0)
    x = neighbour(float(t));
  else
    x = neighbour(float(t) + 100.0f);
  out[t] = x;
}

kernel void in_a_later_round(device float* out [[buffer(0)]], constant uint& width [[buffer(1)]],
                             uint t [[thread_index_in_threadgroup]]) {
  float x = float(t);
  for (uint turn = 0; turn < 2; ++turn) {
    for (uint i = 0; i < 1 + (t / width + turn) % 2; ++i) x = neighbour(x);
  }
  out[t] = x;
}

kernel void after_the_loop(device float* out [[buffer(0)]], constant uint& width [[buffer(1)]],
                           uint t [[thread_index_in_threadgroup]]) {
  float x = float(t);
  uint i = 0;
  while (i < t / width % 2) {
    x = neighbour(x);
    i = i + 1;
  }
  x = neighbour(x);
  if (t / width % 2 == 0) x = neighbour(x);
  out[t] = x;
}

kernel void barriers_by_two_branches(device float* out [[buffer(0)]],
                                     uint t [[thread_index_in_threadgroup]]) {
  if (t < 32) {
    meet();
  } else {
    meet();
  }
  out[t] = 1.0f;
}
