// The memory that a dispatch may write, and who touched it; see race.h.
#pragma once

#include <memory>
#include <vector>

#include "softmetal/race.h"

namespace softmetal {

class Shadows {
 public:
  // Points the bindings of `table` that overlap what an argument of the kernel may write to marks.
  Shadows(const Kernel& kernel, Launch* table);
  Shadows(const Shadows&) = delete;
  ~Shadows();

 private:
  std::vector<std::unique_ptr<DeviceShadow>> shadows_;
};

}  // namespace softmetal
