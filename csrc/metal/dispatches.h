// Where a kernel's grid is cut into dispatches, and which of them may share a command buffer: the
// same for our own command buffers and for a framework's.
#pragma once

#include <vector>

#include "metal/kernels.h"
#include "shared/attn_grid.h"

namespace forge::metal {

// A part of a kernel's grid: x counts rows or tiles, y heads, z sequences.
struct Dispatch {
  Int64 begin[3];
  Int64 count[3];
  double share;  // of the work that a command buffer may hold
};

// Together the whole grid, in order.
std::vector<Dispatch> dispatches_of(const Kernel& kernel);
// The whole grid at once; nothing where it is empty.
std::vector<Dispatch> whole(const Kernel& kernel);

// What a dispatch of tiles is told; what one of rows is.
AttnGrid grid_of(const AttnParams& params, const Dispatch& dispatch);
AttnSpan span_of(const Dispatch& dispatch);

// The work in a command buffer.
class CommandBudget {
 public:
  // Whether the dispatch is to begin a command buffer of its own: the one before it has no room.
  bool begins_another(const Dispatch& dispatch) {
    const bool another = used_ > 0 && used_ + dispatch.share > 1;
    used_ = another ? dispatch.share : used_ + dispatch.share;
    return another;
  }

 private:
  double used_ = 0;
};

}  // namespace forge::metal
