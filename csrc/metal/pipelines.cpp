#include "metal/pipelines.h"

#include <stdexcept>
#include <utility>

#include "metal/context.h"

namespace forge::metal {

void Pipelines::use(NS::SharedPtr<MTL::Device> device, std::unique_ptr<ShaderLibrary> library) {
  device_ = std::move(device);
  library_ = std::move(library);
}

Pipelines::PipelinePtr Pipelines::get(const std::string& kernel, const Switches& switches) {
  std::string key = kernel;
  switches.list([&](FunctionConstant index, bool value) {
    key += ' ' + std::to_string(index) + '=' + (value ? '1' : '0');
  });
  const std::lock_guard<std::mutex> lock(mutex_);
  PipelinePtr& pipeline = made_[key];
  if (!pipeline) pipeline = make(kernel, switches);
  return pipeline;
}

Pipelines::PipelinePtr Pipelines::make(const std::string& kernel, const Switches& switches) const {
  const auto values = NS::TransferPtr(MTL::FunctionConstantValues::alloc()->init());
  switches.list([&](FunctionConstant index, bool value) {
    values->setConstantValue(&value, MTL::DataTypeBool, static_cast<NS::UInteger>(index));
  });
  const std::string what = "the Metal kernel " + kernel + " does not compile: ";
  NS::Error* error = nullptr;
  const auto function = NS::TransferPtr(library_->with(kernel).newFunction(
      NS::String::string(kernel.c_str(), NS::UTF8StringEncoding), values.get(), &error));
  if (!function) throw std::runtime_error(what + text_of(error, "no such function"));
  auto pipeline = NS::TransferPtr(device_->newComputePipelineState(function.get(), &error));
  if (!pipeline) throw std::runtime_error(what + text_of(error, "no reason given"));
  return pipeline;
}

}  // namespace forge::metal
