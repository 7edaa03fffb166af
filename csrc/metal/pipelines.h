// Compiled kernels, one for each set of function constants that was asked for.
#pragma once

#include <Metal/Metal.hpp>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "metal/shader_library.h"
#include "shared/function_constants.h"

namespace forge::metal {

// What a pipeline is compiled for. Cache key and constants both come from list(): one that is
// missing there is missing in both.
struct Switches {
  bool has_softcap = false;
  bool has_dlse = false;
  bool has_causal = false;
  bool has_window = false;
  bool accumulate = false;
  bool is_aligned = false;
  bool is_whole = false;
  bool is_bfloat = false;
  bool is_half_q = false;
  bool is_half_kv = false;
  bool has_rounded = false;
  bool is_half_dq = false;
  bool is_half_dk = false;
  bool is_half_dv = false;
  bool has_runs = false;
  bool has_bias = false;
  bool has_mask = false;
  bool has_sinks = false;
  bool is_half_bias = false;
  bool is_half_sinks = false;
  bool is_half_dbias = false;
  bool is_half_dsinks = false;

  template <typename Visit>
  void list(Visit&& visit) const {
    visit(kConstantHasSoftcap, has_softcap);
    visit(kConstantHasDlse, has_dlse);
    visit(kConstantHasCausal, has_causal);
    visit(kConstantHasWindow, has_window);
    visit(kConstantAccumulate, accumulate);
    visit(kConstantIsAligned, is_aligned);
    visit(kConstantIsWhole, is_whole);
    visit(kConstantIsBfloat, is_bfloat);
    visit(kConstantIsHalfQ, is_half_q);
    visit(kConstantIsHalfKv, is_half_kv);
    visit(kConstantHasRounded, has_rounded);
    visit(kConstantIsHalfDq, is_half_dq);
    visit(kConstantIsHalfDk, is_half_dk);
    visit(kConstantIsHalfDv, is_half_dv);
    visit(kConstantHasRuns, has_runs);
    visit(kConstantHasBias, has_bias);
    visit(kConstantHasMask, has_mask);
    visit(kConstantHasSinks, has_sinks);
    visit(kConstantIsHalfBias, is_half_bias);
    visit(kConstantIsHalfSinks, is_half_sinks);
    visit(kConstantIsHalfDbias, is_half_dbias);
    visit(kConstantIsHalfDsinks, is_half_dsinks);
  }
};

class Pipelines {
 public:
  using PipelinePtr = NS::SharedPtr<MTL::ComputePipelineState>;

  void use(NS::SharedPtr<MTL::Device> device, std::unique_ptr<ShaderLibrary> library);
  const std::string& origin() const { return library_->origin(); }

  // Thread-safe. Throws std::runtime_error with Metal's text where the kernel does not compile.
  PipelinePtr get(const std::string& kernel, const Switches& switches);

 private:
  PipelinePtr make(const std::string& kernel, const Switches& switches) const;

  NS::SharedPtr<MTL::Device> device_;
  std::unique_ptr<ShaderLibrary> library_;
  std::mutex mutex_;
  std::map<std::string, PipelinePtr> made_;
};

}  // namespace forge::metal
