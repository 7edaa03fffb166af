// float16 and bfloat16 as they lie in memory: 16 bits that loads and stores alone look into. All
// that is computed is float32.
#pragma once

#include <cstdint>

namespace forge {

struct Float16 {
  std::uint16_t bits;
};

struct BFloat16 {
  std::uint16_t bits;
};

}  // namespace forge
