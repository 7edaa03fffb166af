#include "core/cpu_target.h"

#include <stdexcept>

namespace forge {
namespace {

bool runs_here(CpuTarget target) {
  switch (target) {
#if defined(__x86_64__)
    case CpuTarget::kBaseline:
      return true;
    case CpuTarget::kAvx2:
      return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case CpuTarget::kAvx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("fma");
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
