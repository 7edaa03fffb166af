// The kernels of each CPU target: one table each of the sources that are compiled once per target.
#pragma once

#include "core/cpu_target.h"
#include "cpu/backward/kernel.h"
#include "cpu/decode/kernel.h"
#include "cpu/forward/kernel.h"

namespace forge::cpu {

struct KernelTables {
  const ForwardKernels& forward;
  const DecodeKernels& decode;
  const BackwardKernels& backward;
};

KernelTables kernel_tables(CpuTarget target);

}  // namespace forge::cpu
