// Kernels that the tests of the software Metal device run.
#include <metal_stdlib>

using namespace metal;

constant bool doubled [[function_constant(0)]];
constant int addend [[function_constant(3)]];
constant float kWeights[3] = {0.5f, 2.0f, 4.0f};

struct Sizes {
  uint count;
  int offset;
};

static inline float sum_of(device const float* from, uint count) {
  float sum = 0.0f;
  for (uint i = 0; i < count; ++i) sum = sum + from[i];
  return sum;
}

// out = 3 in + 1: one load, one fma, one store a thread.
kernel void scale(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
                  constant Sizes& sizes [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  if (i < sizes.count) out[int(i) + sizes.offset] = fma(in[i], 3.0f, 1.0f);
}

kernel void specialized(device int* out [[buffer(0)]],
                        device const int* extra [[buffer(1), function_constant(doubled)]],
                        uint i [[thread_position_in_grid]]) {
  int value = addend;
  if (doubled) value = value + 2 * extra[i];
  out[i] = value;
}

// Reads `extra` although its function constant may be off.
kernel void reads_disabled(device int* out [[buffer(0)]],
                           device const int* extra [[buffer(1), function_constant(doubled)]],
                           uint i [[thread_position_in_grid]]) {
  out[i] = extra[i];
}

template <int N, typename T>
[[kernel]] void repeat(device T* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  for (int n = 0; n < N; ++n) out[i * N + n] = T(n);
}
template [[host_name("repeat_2_float")]] [[kernel]] decltype(repeat<2, float>) repeat<2, float>;
template [[host_name("repeat_3_int")]] [[kernel]] decltype(repeat<3, int>) repeat<3, int>;

kernel void positions(device uint* out [[buffer(0)]], uint3 at [[thread_position_in_grid]],
                      uint3 grid [[threads_per_grid]], ushort3 inside [[thread_position_in_threadgroup]],
                      uint3 group [[threadgroup_position_in_grid]],
                      uint3 size [[threads_per_threadgroup]],
                      ushort index [[thread_index_in_threadgroup]],
                      ushort lane [[thread_index_in_simdgroup]],
                      ushort simdgroup [[simdgroup_index_in_threadgroup]]) {
  uint row = (at.z * grid.y + at.y) * grid.x + at.x;
  device uint* mine = out + row * 10;
  mine[0] = at.x + 100 * at.y + 10000 * at.z;
  mine[1] = inside.x + 100u * inside.y;
  mine[2] = group.x + 100 * group.y;
  mine[3] = size.x + 100 * size.y;
  mine[4] = index;
  mine[5] = lane;
  mine[6] = simdgroup;
  mine[7] = uint(kWeights[at.x % 3] * 2.0f);
  mine[8] = as_type<uint>(1.0f);
  mine[9] = uint(clamp(int(at.x), 1, 2));
}

// Memory

kernel void vectors(device const float4* in [[buffer(0)]], device float* out [[buffer(1)]],
                    uint i [[thread_position_in_grid]]) {
  float4 a = in[i];
  auto b = in[i + 1];
  float4 c = a * 2.0f + b;
  out[2 * i] = dot(c, float4(1.0f, 1.0f, 1.0f, 1.0f));
  device const float* plain = reinterpret_cast<device const float*>(in);
  device float2* pairs = (device float2*)out;
  out[2 * i + 1] = sum_of(plain + 4 * i, 4);
  pairs[i] = pairs[i] + float2(1.0f, 2.0f);
}

kernel void increments(device int* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  device int* p = out + i;
  auto before = *p;
  *p = before + 5;
  *p += before;
  device const int* q = p;
  if (q - out != int(i)) *p = -1;
}

// Threadgroup memory

kernel void reverse(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
                    uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]],
                    uint size [[threads_per_threadgroup]]) {
  threadgroup float tile[256];
  tile[t] = in[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = tile[size - 1 - t];
}

kernel void reverse_argument(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
                             threadgroup float* tile [[threadgroup(0)]],
                             uint i [[thread_position_in_grid]],
                             uint t [[thread_index_in_threadgroup]],
                             uint size [[threads_per_threadgroup]]) {
  tile[t] = in[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[i] = tile[size - 1 - t];
}

static inline float row_sum(threadgroup const float* row, uint count) {
  float sum = 0.0f;
  for (uint i = 0; i < count; ++i) sum = sum + row[i];
  return sum;
}

kernel void two_dimensions(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[4][9];
  threadgroup float total;
  for (uint c = 0; c < 8; ++c) tile[t][c] = float(t * 8 + c);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t == 0) total = row_sum(tile[1], 8);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = total + row_sum(&tile[t][0], 8);
}

kernel void race_write_read(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[64];
  tile[t] = float(t);
  out[t] = tile[t ^ 1];
}

kernel void race_read_write(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[64];
  tile[t] = float(t);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = tile[0];
  if (t == 63) tile[0] = 1.0f;
}

kernel void race_write_write(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[64];
  tile[t / 2] = float(t);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = tile[t / 2];
}

kernel void race_wrong_flags(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[64];
  tile[t] = float(t);
  threadgroup_barrier(mem_flags::mem_device);
  out[t] = tile[t ^ 1];
}

// Right within one simdgroup; a race where `reach` crosses into another.
kernel void simdgroup_exchange(device float* out [[buffer(0)]], constant uint& reach [[buffer(1)]],
                               uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[64];
  for (int round = 0; round < 3; ++round) {
    tile[t] = float(t) + float(round);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    out[t] = tile[t ^ reach];
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// No race: everyone reads what one thread of each simdgroup wrote, in turn, between barriers.
kernel void broadcast_rounds(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[2];
  float sum = 0.0f;
  for (uint round = 0; round < 8; ++round) {
    if (t == round * 8) tile[round % 2] = float(round);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum = sum + tile[round % 2];
  }
  out[t] = sum;
}

kernel void reads_nothing_written(device float* out [[buffer(0)]],
                                  uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[64];
  out[t] = tile[t];
}

kernel void too_much_memory(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float first[6000];
  threadgroup float second[3000];
  first[t] = 1.0f;
  second[t] = 2.0f;
  out[t] = first[t] + second[t];
}

kernel void outside_tile(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float tile[32];
  tile[t + 1] = 1.0f;
  out[t] = 0.0f;
}

// Halves

// Bytes that hold halves: their floats, and those once more as halves.
kernel void widen_and_round(device const uchar* in [[buffer(0)]], device float* wide [[buffer(1)]],
                            device ushort* out [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  ushort bits = reinterpret_cast<device const ushort*>(in)[i];
  wide[i] = float(as_type<half>(bits));
  out[i] = as_type<ushort>(half(wide[i]));
}

kernel void round_to_half(device const float* in [[buffer(0)]], device half4* out [[buffer(1)]],
                          uint i [[thread_position_in_grid]]) {
  out[i] = half4(reinterpret_cast<device const float4*>(in)[i]);
}

kernel void four_bytes_on(device const uchar* in [[buffer(0)]], device float* out [[buffer(1)]],
                          uint i [[thread_position_in_grid]]) {
  out[i] = float((*reinterpret_cast<device const half4*>(in + 8 * i + 4)).x);
}

// Convergence

kernel void divergent_barrier(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  if (t < 40) threadgroup_barrier(mem_flags::mem_threadgroup);
  out[t] = 1.0f;
}

kernel void different_barriers(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  if (t < 32) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  } else {
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  out[t] = 1.0f;
}

kernel void divergent_shuffle(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  float value = float(t);
  if (t < 16) {
    value = simd_shuffle_xor(value, 1);
  } else {
    value = simd_shuffle_xor(value, 2);
  }
  out[t] = value;
}

kernel void early_return(device float* out [[buffer(0)]], constant uint& count [[buffer(1)]],
                         uint t [[thread_index_in_threadgroup]]) {
  if (t >= count) return;
  float sum = simd_sum(float(t));
  out[t] = sum;
}

kernel void reads_inactive(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  if (t >= 16) return;
  out[t] = simd_shuffle(float(t), ushort(t + 16));
}

// Simdgroups

kernel void shuffles(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]]) {
  float value = float(t);
  device float* mine = out + 12 * t;
  mine[0] = simd_shuffle(value, ushort((lane * 5) % 32));
  mine[1] = simd_shuffle_xor(value, 8);
  mine[2] = simd_shuffle_down(value, 3);
  mine[3] = simd_shuffle_up(value, 4);
  mine[4] = simd_broadcast(value, 7);
  mine[5] = simd_sum(value);
  mine[6] = simd_max(value);
  mine[7] = simd_min(value);
  mine[8] = simd_any(lane == 9) ? 1.0f : 0.0f;
  mine[9] = simd_all(lane < 31) ? 1.0f : 0.0f;
  mine[10] = simd_broadcast_first(value);
  float2 pair = simd_shuffle_xor(float2(value, -value), 1);
  mine[11] = pair.x - pair.y;
}

// What each lane holds of an 8x8 matrix.
kernel void lane_layout(device const float* in [[buffer(0)]], device float* out [[buffer(1)]],
                        uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_float8x8 matrix;
  simdgroup_load(matrix, in);
  out[2 * lane] = matrix.thread_elements()[0];
  out[2 * lane + 1] = matrix.thread_elements()[1];
}

kernel void matrix_from_lanes(device float* out [[buffer(0)]], uint lane [[thread_index_in_simdgroup]]) {
  simdgroup_matrix<float, 8, 8> matrix;
  thread auto& elements = matrix.thread_elements();
  elements[0] = float(2 * lane);
  elements[1] = float(2 * lane + 1);
  simdgroup_store(matrix, out, 8);
}

// out = a b + c of 8x8 tiles inside larger rows; one simdgroup a product.
kernel void product(device const float* a [[buffer(0)]], device const float* b [[buffer(1)]],
                    device float* c [[buffer(2)]], constant uint& stride [[buffer(3)]],
                    uint group [[threadgroup_position_in_grid]],
                    uint simdgroup [[simdgroup_index_in_threadgroup]]) {
  uint origin = (group * 2 + simdgroup) * 8 * stride;
  simdgroup_float8x8 x, y, z;
  simdgroup_load(x, a + origin, stride);
  simdgroup_load(y, b + origin, stride);
  simdgroup_load(z, c + origin, stride);
  simdgroup_multiply_accumulate(z, x, y, z);
  simdgroup_store(z, c + origin, stride);
}

// out = a^T b through threadgroup memory, plus twice the identity.
kernel void transposed_product(device const float* a [[buffer(0)]], device const float* b [[buffer(1)]],
                               device float* out [[buffer(2)]],
                               uint t [[thread_index_in_threadgroup]]) {
  threadgroup float left[8 * 12];
  threadgroup float right[8][12];
  for (uint i = t; i < 64; i += 32) {
    left[(i / 8) * 12 + i % 8] = a[i];
    right[i / 8][i % 8] = b[i];
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_float8x8 x, y, z;
  simdgroup_load(x, left, 12, ulong2(0, 0), true);
  simdgroup_load(y, right[0], 12);
  simdgroup_multiply(z, x, y);
  simdgroup_float8x8 two = make_diagonal_simdgroup_matrix<float, 8, 8>(2.0f);
  simdgroup_float8x8 one = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
  simdgroup_multiply_accumulate(z, two, one, z);
  simdgroup_store(z, out, 8, ulong2(0, 0), true);
}

kernel void origins(device const float* in [[buffer(0)]], device float* out [[buffer(1)]]) {
  simdgroup_float8x8 matrix;
  simdgroup_load(matrix, in, 20, ulong2(3, 2));
  simdgroup_store(matrix, out, 8);
}

kernel void transposed_origin(device const float* in [[buffer(0)]], device float* out [[buffer(1)]]) {
  simdgroup_float8x8 matrix;
  simdgroup_load(matrix, in, 20, ulong2(3, 2), true);
  simdgroup_store(matrix, out, 8);
}

kernel void partial_product(device float* out [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  simdgroup_float8x8 x = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
  simdgroup_float8x8 z;
  simdgroup_multiply(z, x, x);
  out[t] = z.thread_elements()[0];
}

// A matrix that is stored to threadgroup memory and loaded by other lanes without a barrier.
kernel void matrix_race(device float* out [[buffer(0)]]) {
  threadgroup float tile[64];
  simdgroup_float8x8 x = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
  simdgroup_store(x, tile, 8);
  simdgroup_load(x, tile, 8, ulong2(0, 0), true);
  simdgroup_store(x, out, 8);
}

kernel void exponentials(device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  float x = float(i) * 0.25f;
  out[4 * i] = exp(-x);
  out[4 * i + 1] = precise::exp2(x);
  out[4 * i + 2] = max(x, 1.5f);
  out[4 * i + 3] = isnan(x) ? 1.0f : select(2.0f, 3.0f, x > 1.0f);
}

[[kernel, max_total_threads_per_threadgroup(64)]] void small_groups(
    device float* out [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  out[i] = 1.0f;
}
