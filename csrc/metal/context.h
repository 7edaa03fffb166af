// The process's Metal device with its queue and kernels: made on first use, made anew after the
// device was lost.
#pragma once

#include <Foundation/Foundation.hpp>
#include <Metal/Metal.hpp>
#include <atomic>
#include <memory>
#include <string>

#include "metal/pipelines.h"

namespace forge::metal {

// Every entry point holds one: Python's threads have no pool of their own.
class AutoreleasePool {
 public:
  AutoreleasePool() : pool_(NS::AutoreleasePool::alloc()->init()) {}
  ~AutoreleasePool() { pool_->release(); }
  AutoreleasePool(const AutoreleasePool&) = delete;
  AutoreleasePool& operator=(const AutoreleasePool&) = delete;

 private:
  NS::AutoreleasePool* pool_;
};

// Metal's text for an error, or `otherwise` where it gave none.
std::string text_of(const NS::Error* error, const char* otherwise);

class Context {
 public:
  // The process's context. Throws std::runtime_error with the reason where there is none.
  static std::shared_ptr<Context> current();
  // The next call of current() makes a new one. Calls that still hold this one end on it.
  static void drop(const std::shared_ptr<Context>& lost);

  MTL::Device& device() const { return *device_.get(); }
  MTL::CommandQueue& queue() const { return *queue_.get(); }
  Pipelines& pipelines() { return pipelines_; }
  const std::string& device_name() const { return device_name_; }
  // "metallib", or "source" with the reason why.
  const std::string& library_origin() const { return pipelines_.origin(); }

  // Whether a fused kernel has been compiled for this device.
  std::atomic<bool> runs_fused{false};

 private:
  Context();

  NS::SharedPtr<MTL::Device> device_;
  NS::SharedPtr<MTL::CommandQueue> queue_;
  std::string device_name_;
  Pipelines pipelines_;
};

}  // namespace forge::metal
