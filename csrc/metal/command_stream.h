// Kernels of one call, encoded one after another into as few command buffers as the watchdog
// allows.
#pragma once

#include <Metal/Metal.hpp>
#include <memory>
#include <vector>

#include "metal/buffers.h"
#include "metal/context.h"
#include "metal/dispatches.h"

namespace forge::metal {

class CommandStream {
 public:
  CommandStream(std::shared_ptr<Context> context, const Buffers& buffers, const AttnParams& params);
  // Waits for what was committed, whatever was thrown: the arrays are the caller's.
  ~CommandStream() { wait(); }
  CommandStream(const CommandStream&) = delete;
  CommandStream& operator=(const CommandStream&) = delete;

  // Encodes the kernel; commits in between where it is too much for one command buffer.
  void run(const Kernel& kernel);
  // Commits the rest and waits. Throws std::runtime_error with Metal's text for a failed command
  // buffer.
  void finish();

 private:
  void encode(const Kernel& kernel, const MTL::ComputePipelineState& pipeline,
              const Dispatch& dispatch);
  void commit();
  void wait();
  [[noreturn]] void fail(const NS::Error* error);

  std::shared_ptr<Context> context_;
  const Buffers& buffers_;
  const AttnParams& params_;
  NS::SharedPtr<MTL::CommandBuffer> commands_;  // null when nothing is encoded
  std::vector<NS::SharedPtr<MTL::CommandBuffer>> committed_;
  CommandBudget budget_;
};

}  // namespace forge::metal
