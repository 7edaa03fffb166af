#include "metal/context.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <filesystem>
#include <mutex>
#include <stdexcept>
#include <system_error>

#include "metal/shader_source.h"

namespace forge::metal {
namespace {

using LibraryPtr = NS::SharedPtr<MTL::Library>;

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

NS::String* string_of(const std::string& text) {
  return NS::String::string(text.c_str(), NS::UTF8StringEncoding);
}

// forge.metallib lies beside the module.
std::filesystem::path metallib_path() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&metallib_path), &info) == 0 || !info.dli_fname) {
    return {};
  }
  return std::filesystem::path(info.dli_fname).parent_path() / "forge.metallib";
}

LibraryPtr library_from_source(MTL::Device& device) {
  const auto options = NS::TransferPtr(MTL::CompileOptions::alloc()->init());
  options->setLanguageVersion(static_cast<MTL::LanguageVersion>(kShaderLanguageVersion));
  // Fast math is the default, and breaks NaN, infinities and the shared exp. The second way to say
  // so is macOS 15's.
  options->setFastMathEnabled(false);
  if (NS::ProcessInfo::processInfo()->isOperatingSystemAtLeastVersion({15, 0, 0})) {
    options->setMathMode(MTL::MathModeSafe);
    options->setMathFloatingPointFunctions(MTL::MathFloatingPointFunctionsPrecise);
  }
  NS::Error* error = nullptr;
  auto library = NS::TransferPtr(device.newLibrary(
      NS::String::string(kShaderSource, NS::UTF8StringEncoding), options.get(), &error));
  if (!library) {
    throw std::runtime_error("the shaders do not compile: " + text_of(error, "no reason given"));
  }
  return library;
}

// The metallib where there is one that loads, else the embedded source.
LibraryPtr load_library(MTL::Device& device, std::string& origin) {
  const std::filesystem::path path = metallib_path();
  std::error_code ignored;
  if (path.empty() || !std::filesystem::exists(path, ignored)) {
    origin = "source: no metallib was built";
    return library_from_source(device);
  }
  NS::Error* error = nullptr;
  auto library = NS::TransferPtr(
      device.newLibrary(NS::URL::fileURLWithPath(string_of(path.string())), &error));
  if (library) {
    origin = "metallib";
    return library;
  }
  origin = "source: the metallib does not load: " + text_of(error, "no reason given");
  return library_from_source(device);
}

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
  pipelines_.use(device_, load_library(*device_.get(), library_origin_));
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
