// The switches a pipeline is compiled for, numbered for host and shaders. They come in groups with
// gaps, so that a new one does not renumber others.
#pragma once

namespace forge {

enum FunctionConstant {
  kConstantHasSoftcap = 0,  // bool: params.softcap > 0
  kConstantHasDlse = 1,     // bool: the gradient of lse is given
  // The fused kernels:
  kConstantHasCausal = 8,    // bool: params.causal
  kConstantHasWindow = 9,    // bool: params.window_left or params.window_right is not -1
  kConstantAccumulate = 10,  // bool: gradients are added to what dq, dk and dv hold
  kConstantIsAligned = 11,   // bool: four channels of a row may be read and written at once
  kConstantIsWhole = 12,     // bool: params.hd is the head dim of the instantiation
  // Element types: 16 bits instead of float.
  kConstantIsBfloat = 16,    // bool: the 16 bits are a bfloat16, not a half
  kConstantIsHalfQ = 17,     // bool: q and dout
  kConstantIsHalfKv = 18,    // bool: k and v
  kConstantHasRounded = 19,  // bool: o is wanted in 16 bits
  kConstantIsHalfDq = 20,    // bool
  kConstantIsHalfDk = 21,    // bool
  kConstantIsHalfDv = 22,    // bool
  // Options that shape the scores:
  kConstantHasRuns = 24,       // bool: a range of keys for each query
  kConstantHasBias = 25,       // bool
  kConstantHasMask = 26,       // bool
  kConstantHasSinks = 27,      // bool
  kConstantIsHalfBias = 28,    // bool
  kConstantIsHalfSinks = 29,   // bool
  kConstantIsHalfDbias = 30,   // bool
  kConstantIsHalfDsinks = 31,  // bool
};

}  // namespace forge
