#pragma once

#include "dispatch/backend.h"

namespace forge {

// The Apple GPU, or the reason why it is not there.
const Backend& metal_backend();

// "off", "on" or "software" (the tests' device).
const char* metal_build_mode();

}  // namespace forge
