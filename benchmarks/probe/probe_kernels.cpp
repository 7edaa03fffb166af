// Compiled once per target: FORGE_TARGET names the namespace, the build sets the instruction set.
#include "probe_kernels.h"

namespace forge::probe {
namespace {

// Chains: enough to cover the latency of every pipe, few enough for the registers.
#if defined(__AVX512F__)
constexpr int kBytes = 64, kChains = 24;
#elif defined(__AVX2__)
constexpr int kBytes = 32, kChains = 12;
#elif defined(__aarch64__)
constexpr int kBytes = 16, kChains = 24;
#else
constexpr int kBytes = 16, kChains = 12;
#endif
constexpr int kLanes = kBytes / 4;

typedef float Vector __attribute__((vector_size(kBytes)));

float sum_of(Vector v) {
  float sum = 0;
  for (int lane = 0; lane < kLanes; ++lane) sum += v[lane];
  return sum;
}

double multiply_add(std::int64_t rounds, float* sink) {
  Vector chain[kChains];
  const Vector factor = Vector{} + 0.999f, addend = Vector{} + 1e-4f;
  for (int i = 0; i < kChains; ++i) chain[i] = Vector{} + (1 + 1e-3f * static_cast<float>(i));
  for (std::int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (int i = 0; i < kChains; ++i) chain[i] = chain[i] * factor + addend;
  }
  Vector sum = chain[0];
  for (int i = 1; i < kChains; ++i) sum += chain[i];
  *sink = sum_of(sum);
  return 2.0 * kLanes * kChains * static_cast<double>(rounds);
}

float read(const float* data, std::int64_t count) {
  constexpr int kStreams = 4;
  Vector sum[kStreams] = {};
  const Vector* vectors = reinterpret_cast<const Vector*>(data);
  for (std::int64_t at = 0; at < count / kLanes; at += kStreams) {
#pragma GCC unroll 4
    for (int i = 0; i < kStreams; ++i) sum[i] += vectors[at + i];
  }
  return sum_of(sum[0] + sum[1] + sum[2] + sum[3]);
}

}  // namespace

namespace FORGE_TARGET {
extern const Kernels kKernels;
const Kernels kKernels = {multiply_add, read};
}  // namespace FORGE_TARGET

}  // namespace forge::probe
