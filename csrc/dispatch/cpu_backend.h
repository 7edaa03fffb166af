#pragma once

#include "dispatch/backend.h"

namespace forge {

// Both families on the CPU; serves every machine.
const Backend& cpu_backend();

}  // namespace forge
