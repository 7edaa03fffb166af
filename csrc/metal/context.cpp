#include "metal/context.h"

#include <pthread.h>

#include <atomic>
#include <mutex>
#include <stdexcept>

namespace forge::metal {
namespace {

// Never destroyed: at exit other threads may still be in a call.
struct Process {
  std::mutex mutex;
  std::shared_ptr<Context> context;
  std::string first_failure;  // kept: a machine without a device does not grow one
  bool had_context = false;
};

Process& process() {
  static Process* const only = new Process;
  return *only;
}

// Apple's frameworks are loaded with the module, and a child that is forked from then on may not
// use them until it execs: connections to the Metal compiler are gone, Objective-C may end the
// process.
std::atomic<bool> forked{false};
[[maybe_unused]] const int registered =
    pthread_atfork(nullptr, nullptr, [] { forked.store(true); });

}  // namespace

std::string text_of(const NS::Error* error, const char* otherwise) {
  if (error == nullptr || error->localizedDescription() == nullptr) return otherwise;
  return error->localizedDescription()->utf8String();
}

Context::Context() : device_(NS::TransferPtr(MTL::CreateSystemDefaultDevice())) {
  if (!device_) {
    // Processes without a window server have no default device, yet may see the GPU.
    const auto all = NS::TransferPtr(MTL::CopyAllDevices());
    if (all && all->count() > 0) device_ = NS::RetainPtr(all->object<MTL::Device>(0));
  }
  if (!device_) throw std::runtime_error("this machine has no Metal device");
  queue_ = NS::TransferPtr(device_->newCommandQueue());
  if (!queue_) throw std::runtime_error("the Metal device gives no command queue");
  if (device_->name() != nullptr) device_name_ = device_->name()->utf8String();
  pipelines_.use(device_, std::make_unique<ShaderLibrary>(device_));
}

std::shared_ptr<Context> Context::current() {
  if (forked.load()) {
    throw std::runtime_error(
        "Metal does not work in a process forked from one that has imported forge; start it with "
        "multiprocessing's 'spawn', or use backend='cpu'");
  }
  Process& here = process();
  const std::lock_guard<std::mutex> lock(here.mutex);
  if (here.context) return here.context;
  if (!here.first_failure.empty()) throw std::runtime_error(here.first_failure);
  const AutoreleasePool pool;
  try {
    here.context.reset(new Context);
  } catch (const std::runtime_error& error) {
    if (!here.had_context) here.first_failure = error.what();
    throw;
  }
  here.had_context = true;
  return here.context;
}

void Context::drop(const std::shared_ptr<Context>& lost) {
  Process& here = process();
  const std::lock_guard<std::mutex> lock(here.mutex);
  if (here.context == lost) here.context.reset();
}

}  // namespace forge::metal
