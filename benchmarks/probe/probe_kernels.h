// The two loops that find the machine's limits, compiled once per instruction set.
#pragma once

#include <cstdint>

namespace forge::probe {

struct Kernels {
  // Runs rounds of independent multiply-adds and returns the floating-point operations done.
  double (*multiply_add)(std::int64_t rounds, float* sink);
  // Adds up count floats; data is aligned to 64 bytes and count a multiple of 256.
  float (*read)(const float* data, std::int64_t count);
};

namespace baseline {
extern const Kernels kKernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
#elif defined(__aarch64__)
namespace neon {
extern const Kernels kKernels;
}
#endif

}  // namespace forge::probe
