// Instruction sets the CPU kernels are compiled for, and which of them this machine can run.
#pragma once

#include <string>
#include <vector>

namespace forge {

// In ascending order of preference. kBaseline is the architecture's minimum: SSE2 on x86-64.
enum class CpuTarget { kBaseline, kNeon, kAvx2, kAvx512 };

const char* cpu_target_name(CpuTarget target);

// The targets this build holds and this machine can run, best first; never empty.
const std::vector<CpuTarget>& usable_cpu_targets();

// The target of that name, or the best one for an empty name. Throws std::invalid_argument for an
// unknown name and for a target that this machine cannot run.
CpuTarget choose_cpu_target(const std::string& name);

}  // namespace forge
