// The vector functions of one target as plain calls, so that a test can try them on every target.
#pragma once

#include <cstdint>

struct SimdKernels {
  const char* name;
  int lanes;
  // n floats each; n is a multiple of lanes
  void (*exp2_of_nonpositive)(const float* x, float* y, std::int64_t n);
  void (*exp_of_nonpositive)(const float* x, float* y, std::int64_t n);
  void (*tanh)(const float* x, float* y, std::int64_t n);
  void (*transpose)(const float* from, float* to);  // lanes x lanes
  void (*copy_partial)(const float* from, float* to, int n);
};
