#include "metal/command_stream.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/interrupt.h"

namespace forge::metal {
namespace {

// One runs while the next waits: more would only have to be waited for when the call is
// interrupted.
constexpr std::size_t kMostInFlight = 2;
// What a threadgroup should be; a pipeline may allow less, and drops what is more.
constexpr NS::UInteger kThreadsPerThreadgroup = 256;

}  // namespace

CommandStream::CommandStream(std::shared_ptr<Context> context, const Buffers& buffers,
                             const AttnParams& params)
    : context_(std::move(context)), buffers_(buffers), params_(params) {}

void CommandStream::run(const Kernel& kernel) {
  const auto pipeline = context_->pipelines().get(kernel.name, kernel.switches);
  for (const Dispatch& dispatch : dispatches_of(kernel)) {
    if (budget_.begins_another(dispatch)) commit();
    encode(kernel, *pipeline.get(), dispatch);
  }
}

void CommandStream::encode(const Kernel& kernel, const MTL::ComputePipelineState& pipeline,
                           const Dispatch& dispatch) {
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
  const auto count = [&](int axis) { return static_cast<NS::UInteger>(dispatch.count[axis]); };
  if (threads == 0) {
    const AttnSpan span = span_of(dispatch);
    encoder->setBytes(&span, sizeof span, kBufferSpan);
    encoder->dispatchThreads(MTL::Size(count(0), 1, 1),
                             MTL::Size(std::min(kThreadsPerThreadgroup, limit), 1, 1));
  } else {
    const AttnGrid grid = grid_of(params_, dispatch);
    encoder->setBytes(&grid, sizeof grid, kBufferGrid);
    encoder->dispatchThreadgroups(MTL::Size(count(0), count(1), count(2)),
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
