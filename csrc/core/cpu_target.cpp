#include "core/cpu_target.h"

#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace forge {
namespace {

#if defined(__x86_64__)

// Asked of the processor itself: __builtin_cpu_supports needs a run-time library that fills its
// table, and with some toolchains none does. Bit numbers are those of Intel's manual, volume 2.
struct CpuFeatures {
  bool avx2 = false;
  bool avx512 = false;
};

constexpr bool bit(unsigned value, int index) { return (value >> index & 1u) != 0; }

// XCR0: the register states that the operating system saves. Only valid where OSXSAVE is set.
unsigned saved_states() {
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

CpuFeatures cpu_features() {
  CpuFeatures features;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return features;
  const bool fma = bit(ecx, 12), osxsave = bit(ecx, 27), avx = bit(ecx, 28), f16c = bit(ecx, 29);
  if (!osxsave || !avx || !fma || !f16c) return features;
  constexpr unsigned kYmmStates = 0x06;  // SSE, AVX
  constexpr unsigned kZmmStates = 0xe6;  // and opmask, ZMM low and high halves
  const unsigned states = saved_states();
  if ((states & kYmmStates) != kYmmStates) return features;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return features;
  features.avx2 = bit(ebx, 5);
  const bool f = bit(ebx, 16), dq = bit(ebx, 17), bw = bit(ebx, 30), vl = bit(ebx, 31);
  features.avx512 = features.avx2 && f && dq && bw && vl && (states & kZmmStates) == kZmmStates;
  return features;
}

#endif

bool runs_here(CpuTarget target) {
  switch (target) {
#if defined(__x86_64__)
    case CpuTarget::kBaseline:
      return true;
    case CpuTarget::kAvx2:
      return cpu_features().avx2;
    case CpuTarget::kAvx512:
      return cpu_features().avx512;
    case CpuTarget::kNeon:
      return false;
#elif defined(__aarch64__)
    case CpuTarget::kNeon:
      return true;
    default:
      return false;
#else
    case CpuTarget::kBaseline:
      return true;
    default:
      return false;
#endif
  }
  return false;
}

std::vector<CpuTarget> find_targets() {
  std::vector<CpuTarget> targets;
  for (CpuTarget target :
       {CpuTarget::kAvx512, CpuTarget::kAvx2, CpuTarget::kNeon, CpuTarget::kBaseline}) {
    if (runs_here(target)) targets.push_back(target);
  }
  return targets;
}

}  // namespace

const char* cpu_target_name(CpuTarget target) {
  switch (target) {
    case CpuTarget::kNeon:
      return "neon";
    case CpuTarget::kAvx2:
      return "avx2";
    case CpuTarget::kAvx512:
      return "avx512";
    case CpuTarget::kBaseline:
      break;
  }
  return "baseline";
}

const std::vector<CpuTarget>& usable_cpu_targets() {
  static const std::vector<CpuTarget> targets = find_targets();
  return targets;
}

CpuTarget choose_cpu_target(const std::string& name) {
  if (name.empty()) return usable_cpu_targets().front();
  std::string usable;
  for (CpuTarget target : usable_cpu_targets()) {
    if (name == cpu_target_name(target)) return target;
    usable += usable.empty() ? "" : ", ";
    usable += cpu_target_name(target);
  }
  throw std::invalid_argument("FORGE_CPU_TARGET must be a target this machine can run (" + usable +
                              "), got '" + name + "'");
}

}  // namespace forge
