// Compiled once per target, with that target's flags.
#include "simd_kernels.h"

#include "cpu/bias.h"
#include "cpu/simd_math.h"
#include "cpu/stored.h"

namespace forge::cpu::FORGE_TARGET {
namespace {

void apply_exp2(const float* x, float* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += kLanes) store(y + i, exp2_of_nonpositive(load(x + i)));
}

void apply_exp(const float* x, float* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += kLanes) store(y + i, exp_of_nonpositive(load(x + i)));
}

void apply_tanh(const float* x, float* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; i += kLanes) store(y + i, tanh(load(x + i)));
}

void apply_transpose(const float* from, float* to) {
  Vec rows[kLanes];
  for (int i = 0; i < kLanes; ++i) rows[i] = load(from + i * kLanes);
  transpose(rows);
  for (int i = 0; i < kLanes; ++i) store(to + i * kLanes, rows[i]);
}

void copy_partial(const float* from, float* to, int n) {
  store_partial(to, load_partial(from, n), n);
}

bool pack_bias_tile(const PairArrays& arrays, const PairRow* rows, std::int64_t count,
                    IndexRange keys, float* to, std::int64_t stride, bool& hides_all) {
  const BiasTile tile = pack_bias(arrays, rows, count, keys, to, stride);
  hides_all = tile.hides_all;
  return tile.at != nullptr;
}

}  // namespace

#define FORGE_NAME_TEXT(target) #target
#define FORGE_NAME(target) FORGE_NAME_TEXT(target)

extern const SimdKernels kSimdKernels;
const SimdKernels kSimdKernels = {
    FORGE_NAME(FORGE_TARGET), kLanes,       apply_exp2,    apply_exp, apply_tanh,
    apply_transpose,          copy_partial, pack_bias_tile};

}  // namespace forge::cpu::FORGE_TARGET
