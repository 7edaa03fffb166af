#include "cpu/kernel_tables.h"

namespace forge::cpu {

#define FORGE_DECLARE_TARGET(target)             \
  namespace target {                             \
  extern const ForwardKernels kForwardKernels;   \
  extern const DecodeKernels kDecodeKernels;     \
  extern const BackwardKernels kBackwardKernels; \
  }
#define FORGE_TABLES(target) \
  {target::kForwardKernels, target::kDecodeKernels, target::kBackwardKernels}

#if defined(__aarch64__)
FORGE_DECLARE_TARGET(neon)
#else
FORGE_DECLARE_TARGET(baseline)
#endif
#if defined(__x86_64__)
FORGE_DECLARE_TARGET(avx2)
FORGE_DECLARE_TARGET(avx512)
#endif

KernelTables kernel_tables(CpuTarget target) {
  (void)target;  // an architecture may have but one
#if defined(__aarch64__)
  return FORGE_TABLES(neon);
#else
#if defined(__x86_64__)
  if (target == CpuTarget::kAvx512) return FORGE_TABLES(avx512);
  if (target == CpuTarget::kAvx2) return FORGE_TABLES(avx2);
#endif
  return FORGE_TABLES(baseline);
#endif
}

}  // namespace forge::cpu
