// A device with the library of shaders/checks.metal, driven through metal-cpp.
#pragma once

#include <Metal/Metal.hpp>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"

extern "C" {
int softmetal_set(const char* name, std::int64_t value);
std::int64_t softmetal_get(const char* name);
void softmetal_reset();
}

struct PoolScope {
  NS::AutoreleasePool* pool = NS::AutoreleasePool::alloc()->init();
  PoolScope() = default;
  PoolScope(const PoolScope&) = delete;
  PoolScope& operator=(const PoolScope&) = delete;
  ~PoolScope() { pool->release(); }
};

inline NS::String* text_of(const std::string& text) {
  return NS::String::string(text.c_str(), NS::UTF8StringEncoding);
}

// A retained object.
template <typename T>
NS::SharedPtr<T> owned(T* object) {
  return NS::TransferPtr(object);
}

const std::string& checks_source();  // the text the device was built from

struct Gpu {
  NS::SharedPtr<MTL::Device> device = owned(MTL::CreateSystemDefaultDevice());
  NS::SharedPtr<MTL::Library> library;
  NS::SharedPtr<MTL::CommandQueue> queue;
  std::string error;  // of the last step that failed

  Gpu() {
    NS::Error* failure = nullptr;
    library = owned(device->newLibrary(text_of(checks_source()), nullptr, &failure));
    if (!library) note(failure);
    queue = owned(device->newCommandQueue());
  }
  void note(NS::Error* failure) {
    error = failure == nullptr ? "nil" : failure->localizedDescription()->utf8String();
  }
  NS::SharedPtr<MTL::ComputePipelineState> pipeline(
      const char* name, const MTL::FunctionConstantValues* values = nullptr) {
    NS::Error* failure = nullptr;
    auto function =
        owned(values == nullptr ? library->newFunction(text_of(name))
                                : library->newFunction(text_of(name), values, &failure));
    if (!function) {
      note(failure);
      return {};
    }
    auto made = owned(device->newComputePipelineState(function.get(), &failure));
    if (!made) note(failure);
    return made;
  }
  template <typename T>
  NS::SharedPtr<MTL::Buffer> buffer(const std::vector<T>& values) {
    return owned(device->newBuffer(values.data(), values.size() * sizeof(T),
                                   MTL::ResourceStorageModeShared));
  }
};

template <typename T>
T* contents(const NS::SharedPtr<MTL::Buffer>& buffer) {
  return static_cast<T*>(buffer->contents());
}

// One dispatch in one command buffer.
struct Run {
  explicit Run(Gpu& on) : gpu(on) {
    commands = on.queue->commandBuffer();
    encoder = commands->computeCommandEncoder();
  }
  Run& kernel(const char* name) {
    auto pipeline = gpu.pipeline(name);
    if (pipeline) encoder->setComputePipelineState(pipeline.get());
    return *this;
  }
  Run& bind(const NS::SharedPtr<MTL::Buffer>& buffer, NS::UInteger index, NS::UInteger offset = 0) {
    encoder->setBuffer(buffer.get(), offset, index);
    return *this;
  }
  template <typename T>
  Run& value(const T& given, NS::UInteger index) {
    encoder->setBytes(&given, sizeof given, index);
    return *this;
  }
  // The error text of the command buffer, "" where it completed.
  std::string go(MTL::Size threads, MTL::Size group) {
    encoder->dispatchThreads(threads, group);
    encoder->endEncoding();
    return finish();
  }
  std::string go(NS::UInteger threads, NS::UInteger group) {
    return go(MTL::Size(threads, 1, 1), MTL::Size(group, 1, 1));
  }
  std::string finish() {
    commands->commit();
    commands->waitUntilCompleted();
    if (commands->status() == MTL::CommandBufferStatusCompleted) return "";
    CHECK(commands->status() == MTL::CommandBufferStatusError);
    return commands->error()->localizedDescription()->utf8String();
  }

  Gpu& gpu;
  MTL::CommandBuffer* commands;
  MTL::ComputeCommandEncoder* encoder;
};

// Whether `text` has all the parts; says so where not.
inline bool has(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    if (text.find(part) == std::string::npos) {
      std::fprintf(stderr, "'%s' is missing in: %s\n", part.c_str(), text.c_str());
      return false;
    }
  }
  return true;
}
