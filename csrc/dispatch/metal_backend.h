#pragma once

#include "dispatch/backend.h"

namespace forge {

// The Apple GPU, or the reason why it is not there.
const Backend& metal_backend();

}  // namespace forge
