// The vector functions of one target as plain calls, so that a test can try them on every target.
#pragma once

#include <cstdint>

#include "core/cpu_target.h"
#include "cpu/rows.h"

struct SimdKernels {
  const char* name;
  int lanes;
  // n floats each; n is a multiple of lanes
  void (*exp2_of_nonpositive)(const float* x, float* y, std::int64_t n);
  void (*exp_of_nonpositive)(const float* x, float* y, std::int64_t n);
  void (*tanh)(const float* x, float* y, std::int64_t n);
  void (*transpose)(const float* from, float* to);  // lanes x lanes
  void (*copy_partial)(const float* from, float* to, int n);
  // As pack_bias in csrc/cpu/bias.h; whether there is anything to add
  bool (*pack_bias)(const forge::cpu::PairArrays& arrays, const forge::cpu::PairRow* rows,
                    std::int64_t count, forge::IndexRange keys, float* to, std::int64_t stride,
                    bool& hides_all);
};

#if defined(__x86_64__)
namespace forge::cpu::baseline {
extern const SimdKernels kSimdKernels;
}
namespace forge::cpu::avx2 {
extern const SimdKernels kSimdKernels;
}
namespace forge::cpu::avx512 {
extern const SimdKernels kSimdKernels;
}
#elif defined(__aarch64__)
namespace forge::cpu::neon {
extern const SimdKernels kSimdKernels;
}
#endif

inline const SimdKernels& kernels_of(forge::CpuTarget target) {
#if defined(__x86_64__)
  if (target == forge::CpuTarget::kAvx512) return forge::cpu::avx512::kSimdKernels;
  if (target == forge::CpuTarget::kAvx2) return forge::cpu::avx2::kSimdKernels;
  return forge::cpu::baseline::kSimdKernels;
#else
  (void)target;
  return forge::cpu::neon::kSimdKernels;
#endif
}
