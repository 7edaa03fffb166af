// The switches a pipeline is compiled for, as the kernels read them.
#pragma once

#include "shared/function_constants.h"

constant bool has_softcap [[function_constant(forge::kConstantHasSoftcap)]];
constant bool has_dlse [[function_constant(forge::kConstantHasDlse)]];
constant bool has_causal [[function_constant(forge::kConstantHasCausal)]];
constant bool has_window [[function_constant(forge::kConstantHasWindow)]];
constant bool accumulate [[function_constant(forge::kConstantAccumulate)]];
constant bool is_aligned [[function_constant(forge::kConstantIsAligned)]];
constant bool is_whole [[function_constant(forge::kConstantIsWhole)]];
