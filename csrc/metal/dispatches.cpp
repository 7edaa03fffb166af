#include "metal/dispatches.h"

#include <algorithm>

namespace forge::metal {
namespace {

// Metal's watchdog ends a command buffer after seconds, sooner where the GPU draws a display. One
// thread a row reaches a few percent of a GPU's peak: at 10 GFMA/s this many take 0.4 s.
constexpr double kRowFmas = 4e9;
// The tiles of the fused kernels reach some 0.33 TFMA/s on the smallest of Apple's GPUs: 0.3 s. The
// command buffers of a call run one after another, so each must fill the GPU: one of 40 cores runs
// 80 threadgroups and more at once, and is idle in the end while the last of them run. Where tiles
// are large, many of them matter more than the time, up to a second of that smallest GPU.
constexpr double kTileFmas = 1e11;
constexpr double kMostTileFmas = 3e11;
constexpr double kEnoughTiles = 2048;
// The index in the grid has 32 bits.
constexpr double kMaxCountPerDispatch = 1u << 31;

// How many rows or tiles of a kernel a command buffer of its own holds.
Int64 fit(const Kernel& kernel) {
  const double each = std::max(1.0, kernel.fmas_each);
  const double fmas = kernel.threadgroup_threads == 0
                          ? kRowFmas
                          : std::clamp(kEnoughTiles * each, kTileFmas, kMostTileFmas);
  return static_cast<Int64>(std::clamp(fmas / each, 1.0, kMaxCountPerDispatch));
}

// The next part of what is left, from threadgroup or row number `done` on, of at most `most`. A
// part is a box: some x of one (y, z), or all x of some y of one z, or all of some z.
Dispatch next_part(const Kernel& kernel, Int64 done, Int64 most) {
  const Int64 extents[] = {kernel.count, kernel.heads, kernel.batch};
  Dispatch part = {{0, 0, 0}, {1, 1, 1}, 0};
  for (int axis = 0; axis < 3; ++axis) {
    part.begin[axis] = done % extents[axis];
    done /= extents[axis];
  }
  for (int axis = 0; axis < 3; ++axis) {
    part.count[axis] = std::min(most, extents[axis] - part.begin[axis]);
    most /= extents[axis];
    if (part.count[axis] < extents[axis] || most < 1) break;
  }
  return part;
}

}  // namespace

std::vector<Dispatch> dispatches_of(const Kernel& kernel) {
  std::vector<Dispatch> dispatches;
  const Int64 most = fit(kernel);
  const Int64 all = kernel.count * kernel.heads * kernel.batch;
  for (Int64 done = 0; done < all;) {
    // Pieces of one size: a small one at the end would leave most of a GPU idle.
    const Int64 pieces = (all - done + most - 1) / most;
    Dispatch part = next_part(kernel, done, (all - done + pieces - 1) / pieces);
    const Int64 count = part.count[0] * part.count[1] * part.count[2];
    part.share = static_cast<double>(count) / static_cast<double>(most);
    dispatches.push_back(part);
    done += count;
  }
  return dispatches;
}

std::vector<Dispatch> whole(const Kernel& kernel) {
  if (kernel.count * kernel.heads * kernel.batch == 0) return {};
  return {{{0, 0, 0}, {kernel.count, kernel.heads, kernel.batch}, 1}};
}

AttnGrid grid_of(const AttnParams& params, const Dispatch& dispatch) {
  AttnGrid grid = attn_grid(params);
  grid.tile = static_cast<Int32>(dispatch.begin[0]);
  grid.head = static_cast<Int32>(dispatch.begin[1]);
  grid.batch = static_cast<Int32>(dispatch.begin[2]);
  return grid;
}

AttnSpan span_of(const Dispatch& dispatch) {
  return {dispatch.begin[0], dispatch.begin[0] + dispatch.count[0]};
}

}  // namespace forge::metal
