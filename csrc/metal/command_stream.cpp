#include "metal/command_stream.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/interrupt.h"
#include "shared/attn_grid.h"

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
// One runs while the next waits: more would only have to be waited for when the call is
// interrupted.
constexpr std::size_t kMostInFlight = 2;
// The index in the grid has 32 bits.
constexpr double kMaxCountPerDispatch = 1u << 31;
// What a threadgroup should be; a pipeline may allow less, and drops what is more.
constexpr NS::UInteger kThreadsPerThreadgroup = 256;

// How many rows or tiles of a kernel a command buffer of its own holds.
Int64 fit(const Kernel& kernel) {
  const double each = std::max(1.0, kernel.fmas_each);
  const double fmas = kernel.threadgroup_threads == 0
                          ? kRowFmas
                          : std::clamp(kEnoughTiles * each, kTileFmas, kMostTileFmas);
  return static_cast<Int64>(std::clamp(fmas / each, 1.0, kMaxCountPerDispatch));
}

}  // namespace

CommandStream::CommandStream(std::shared_ptr<Context> context, const Buffers& buffers,
                             const AttnParams& params)
    : context_(std::move(context)), buffers_(buffers), params_(params) {}

void CommandStream::run(const Kernel& kernel) {
  const auto pipeline = context_->pipelines().get(kernel.name, kernel.switches);
  const Int64 most = fit(kernel);
  const Int64 all = kernel.count * kernel.heads * kernel.batch;
  for (Int64 done = 0; done < all;) {
    // Pieces of one size: a small one at the end would leave most of a GPU idle.
    const Int64 pieces = (all - done + most - 1) / most;
    const Part part = next_part(kernel, done, (all - done + pieces - 1) / pieces);
    const Int64 count = part.count[0] * part.count[1] * part.count[2];
    const double share = static_cast<double>(count) / static_cast<double>(most);
    if (commands_ && used_ + share > 1) commit();
    encode(kernel, *pipeline.get(), part);
    used_ += share;
    done += count;
  }
}

// A part is a box: some x of one (y, z), or all x of some y of one z, or all of some z.
CommandStream::Part CommandStream::next_part(const Kernel& kernel, Int64 done, Int64 most) {
  const Int64 extents[] = {kernel.count, kernel.heads, kernel.batch};
  Part part = {{0, 0, 0}, {1, 1, 1}};
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

void CommandStream::encode(const Kernel& kernel, const MTL::ComputePipelineState& pipeline,
                           const Part& part) {
  const NS::UInteger limit = pipeline.maxTotalThreadsPerThreadgroup();
  const auto threads = static_cast<NS::UInteger>(kernel.threadgroup_threads);
  if (threads > limit) {
    throw std::runtime_error("the Metal kernel " + kernel.name + " needs threadgroups of " +
                             std::to_string(threads) + " threads, this device runs " +
                             std::to_string(limit));
  }
  if (!commands_) commands_ = NS::RetainPtr(context_->queue().commandBuffer());
  if (!commands_) throw std::runtime_error("the Metal device gives no command buffer");
  // From here to endEncoding nothing may throw: Metal ends the process where an encoder is released
  // before that.
  MTL::ComputeCommandEncoder* encoder = commands_->computeCommandEncoder();
  if (encoder == nullptr) throw std::runtime_error("the Metal device gives no command encoder");
  encoder->setComputePipelineState(&pipeline);
  buffers_.bind(*encoder);
  encoder->setBytes(&params_, sizeof params_, kBufferParams);
  if (threads == 0) {
    const AttnSpan span = {part.begin[0], part.begin[0] + part.count[0]};
    encoder->setBytes(&span, sizeof span, kBufferSpan);
    encoder->dispatchThreads(MTL::Size(static_cast<NS::UInteger>(part.count[0]), 1, 1),
                             MTL::Size(std::min(kThreadsPerThreadgroup, limit), 1, 1));
  } else {
    AttnGrid grid = attn_grid(params_);
    grid.tile = static_cast<Int32>(part.begin[0]);
    grid.head = static_cast<Int32>(part.begin[1]);
    grid.batch = static_cast<Int32>(part.begin[2]);
    encoder->setBytes(&grid, sizeof grid, kBufferGrid);
    encoder->dispatchThreadgroups(MTL::Size(static_cast<NS::UInteger>(part.count[0]),
                                            static_cast<NS::UInteger>(part.count[1]),
                                            static_cast<NS::UInteger>(part.count[2])),
                                  MTL::Size(threads, 1, 1));
  }
  encoder->endEncoding();
}

void CommandStream::commit() {
  if (!commands_) return;
  if (committed_.size() >= kMostInFlight) {
    committed_[committed_.size() - kMostInFlight]->waitUntilCompleted();
    if (interrupt_asked()) throw Interrupted();  // the destructor waits for the others
  }
  commands_->commit();
  committed_.push_back(commands_);
  commands_.reset();
  used_ = 0;
}

void CommandStream::wait() {
  for (const auto& commands : committed_) commands->waitUntilCompleted();
}

void CommandStream::finish() {
  commit();
  wait();
  for (const auto& commands : committed_) {
    if (commands->status() != MTL::CommandBufferStatusCompleted) fail(commands->error());
  }
}

void CommandStream::fail(const NS::Error* error) {
  std::string text = "the Metal device failed: " + text_of(error, "it gave no reason");
  const NS::Integer code = error == nullptr ? 0 : error->code();
  if (code == MTL::CommandBufferErrorAccessRevoked ||
      code == MTL::CommandBufferErrorDeviceRemoved) {
    Context::drop(context_);
    text += " (the device is lost; the next call starts anew)";
  }
  throw std::runtime_error(text);
}

}  // namespace forge::metal
