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

// Element types, of arrays that have either float or the call's 16-bit type.
constant bool is_bfloat [[function_constant(forge::kConstantIsBfloat)]];
constant bool is_half_q [[function_constant(forge::kConstantIsHalfQ)]];  // and dout
constant bool is_half_kv [[function_constant(forge::kConstantIsHalfKv)]];
constant bool has_rounded [[function_constant(forge::kConstantHasRounded)]];
constant bool is_half_dq [[function_constant(forge::kConstantIsHalfDq)]];
constant bool is_half_dk [[function_constant(forge::kConstantIsHalfDk)]];
constant bool is_half_dv [[function_constant(forge::kConstantIsHalfDv)]];

// Options that shape the scores.
constant bool has_runs [[function_constant(forge::kConstantHasRuns)]];
constant bool has_bias [[function_constant(forge::kConstantHasBias)]];
constant bool has_mask [[function_constant(forge::kConstantHasMask)]];
constant bool has_sinks [[function_constant(forge::kConstantHasSinks)]];
constant bool is_half_bias [[function_constant(forge::kConstantIsHalfBias)]];
constant bool is_half_sinks [[function_constant(forge::kConstantIsHalfSinks)]];
constant bool is_half_dbias [[function_constant(forge::kConstantIsHalfDbias)]];
constant bool is_half_dsinks [[function_constant(forge::kConstantIsHalfDsinks)]];
