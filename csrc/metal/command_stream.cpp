#include "metal/command_stream.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/interrupt.h"

namespace forge::metal {
namespace {

// Metal's watchdog ends a command buffer after seconds, sooner where the GPU draws a display. One
// thread a row reaches a few percent of a GPU's peak: at 10 GFMA/s this many take 0.4 s.
constexpr double kMaxFmasPerCommandBuffer = 4e9;
// One runs while the next waits: more would only have to be waited for when the call is
// interrupted.
constexpr std::size_t kMostInFlight = 2;
// The index in the grid has 32 bits.
constexpr double kMaxCountPerDispatch = 1u << 31;
// What a threadgroup should be; a pipeline may allow less, and drops what is more.
constexpr NS::UInteger kThreadsPerThreadgroup = 256;

}  // namespace

CommandStream::CommandStream(std::shared_ptr<Context> context, const Buffers& buffers,
                             const AttnParams& params)
    : context_(std::move(context)), buffers_(buffers), params_(params) {}

void CommandStream::run(const Kernel& kernel) {
  const auto pipeline = context_->pipelines().get(kernel.name, kernel.switches);
  const double cost = std::max(1.0, kernel.fmas_each);
  for (Int64 begin = 0; begin < kernel.count;) {
    const double fit = (kMaxFmasPerCommandBuffer - fmas_) / cost;
    if (fit < 1 && commands_) {
      commit();
      continue;
    }
    const auto count = static_cast<Int64>(std::clamp(fit, 1.0, kMaxCountPerDispatch));
    const AttnSpan span = {begin, begin + std::min(count, kernel.count - begin)};
    encode(kernel, *pipeline.get(), span);
    fmas_ += static_cast<double>(span.end - span.begin) * cost;
    begin = span.end;
  }
}

void CommandStream::encode(const Kernel& kernel, const MTL::ComputePipelineState& pipeline,
                           const AttnSpan& span) {
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
  encoder->setBytes(&span, sizeof span, kBufferSpan);
  const MTL::Size count(static_cast<NS::UInteger>(span.end - span.begin), 1, 1);
  if (threads == 0) {
    encoder->dispatchThreads(count, MTL::Size(std::min(kThreadsPerThreadgroup, limit), 1, 1));
  } else {
    encoder->dispatchThreadgroups(count, MTL::Size(threads, 1, 1));
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
  fmas_ = 0;
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
