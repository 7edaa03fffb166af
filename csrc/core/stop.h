// A header of its own without anything inline, for kernels that are compiled for several targets.
#pragma once

namespace forge {

// Whether the task that this thread runs is to return early, its work undone, since the call was
// interrupted. For tasks that may take longer than some milliseconds, to ask each of them or so.
bool stop_requested();

}  // namespace forge
