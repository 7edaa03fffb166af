#include "metal/attention.h"

#include <algorithm>
#include <exception>
#include <initializer_list>

#include "metal/buffers.h"
#include "metal/command_stream.h"
#include "metal/context.h"
#include "metal/kernels.h"

namespace forge::metal {
namespace {

// One call: the arrays it is given, then the kernels it runs.
class Call {
 public:
  Call(const Problem& problem, const OwnedMemory& owned)
      : context_(Context::current()),
        params_(params_as<float>(problem)),
        buffers_(context_->device(), owned),
        stream_(context_, buffers_, params_) {
    buffers_.add_private(kBufferRanges, "ranges", problem.ranges.data(),
                         problem.ranges.size() * sizeof(AttnRange));
  }

  void query_like(BufferIndex slot, const char* name, Access access, const float* data,
                  AttnStrides AttnParams::* strides) {
    add(slot, name, access, data, params_.Tq, params_.H, strides);
  }
  void key_like(BufferIndex slot, const char* name, Access access, const float* data,
                AttnStrides AttnParams::* strides) {
    add(slot, name, access, data, params_.Tk, params_.Hkv, strides);
  }
  // [B, H, Tq, floats], contiguous.
  void per_row(BufferIndex slot, const char* name, Access access, const float* data,
               Int64 floats = 1) {
    buffers_.add({slot, name, access, const_cast<float*>(data), 1, 1, 1, query_rows() * floats});
  }
  void optional_dlse(const float* dlse) {
    if (dlse != nullptr) per_row(kBufferDlse, "dlse", Access::kRead, dlse);
  }
  // Memory of the call's own.
  void scratch(BufferIndex slot, const char* name, Int64 floats) {
    buffers_.add_private(slot, name, nullptr, static_cast<std::size_t>(floats) * sizeof(float));
  }

  Ran run(std::initializer_list<Kernel> kernels) {
    buffers_.make();
    for (const Kernel& kernel : kernels) stream_.run(kernel);
    stream_.finish();
    buffers_.copy_back();
    return {context_->device_name(), context_->library_origin(), buffers_.report()};
  }

  const AttnParams& params() const { return params_; }

 private:
  void add(BufferIndex slot, const char* name, Access access, const float* data, Int64 T,
           Int64 heads, AttnStrides AttnParams::* strides) {
    buffers_.add({slot, name, access, const_cast<float*>(data), params_.B, T, heads, params_.hd,
                  &(params_.*strides)});
  }
  Int64 query_rows() const { return params_.B * params_.H * params_.Tq; }

  std::shared_ptr<Context> context_;
  AttnParams params_;
  Buffers buffers_;
  CommandStream stream_;
};

// What the dq and the dk/dv kernels of both families read.
void add_backward_inputs(Call& call, const BackwardArrays<float>& arrays) {
  call.query_like(kBufferQ, "q", Access::kRead, arrays.q, &AttnParams::q);
  call.key_like(kBufferK, "k", Access::kRead, arrays.k, &AttnParams::k);
  call.key_like(kBufferV, "v", Access::kRead, arrays.v, &AttnParams::v);
  call.query_like(kBufferDout, "dout", Access::kRead, arrays.dout, &AttnParams::dout);
}

void add_dq(Call& call, Access access, const BackwardArrays<float>& arrays) {
  call.query_like(kBufferDq, "dq", access, arrays.dq, &AttnParams::dq);
}

void add_dkv(Call& call, Access access, const BackwardArrays<float>& arrays) {
  call.key_like(kBufferDk, "dk", access, arrays.dk, &AttnParams::dk);
  call.key_like(kBufferDv, "dv", access, arrays.dv, &AttnParams::dv);
}

}  // namespace

std::string unavailable_reason() {
  try {
    Context::current();
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

std::string fused_unavailable_reason(const Problem& problem) {
  const AutoreleasePool pool;
  try {
    const std::shared_ptr<Context> context = Context::current();
    if (context->runs_fused) return "";
    const AttnParams params = params_as<float>(problem);
    const Kernel kernel = fused::is_decode(params) ? fused::decode(params) : fused::fwd(params);
    context->pipelines().get(kernel.name, kernel.switches);
    context->runs_fused = true;
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

Ran attention_fwd(const Problem& problem, const ForwardArrays<float>& arrays,
                  const OwnedMemory& owned) {
  const AutoreleasePool pool;
  Call call(problem, owned);
  const AttnParams& params = call.params();
  call.query_like(kBufferQ, "q", Access::kRead, arrays.q, &AttnParams::q);
  call.key_like(kBufferK, "k", Access::kRead, arrays.k, &AttnParams::k);
  call.key_like(kBufferV, "v", Access::kRead, arrays.v, &AttnParams::v);
  call.query_like(kBufferO, "out", Access::kWrite, arrays.o, &AttnParams::o);
  call.per_row(kBufferRowMax, "row_max", Access::kWrite, arrays.stats.row_max);
  call.per_row(kBufferRowSum, "row_sum", Access::kWrite, arrays.stats.row_sum);
  if (problem.family == Family::kMaterialized) {
    call.per_row(kBufferP, "probs", Access::kWrite, arrays.p, params.Tk);
    return call.run({materialized::fwd(params)});
  }
  if (!fused::is_decode(params)) return call.run({fused::fwd(params)});
  call.scratch(kBufferPartial, "partial", fused::decode_partial_size(params));
  return call.run({fused::decode(params), fused::decode_combine(params)});
}

Ran attention_bwd(const Problem& problem, const BackwardArrays<float>& arrays, bool accumulate,
                  const OwnedMemory& owned) {
  const AutoreleasePool pool;
  const bool is_fused = problem.family == Family::kFused;
  Call call(problem, owned);
  const AttnParams& params = call.params();
  add_backward_inputs(call, arrays);
  call.query_like(kBufferO, "out", Access::kRead, arrays.o, &AttnParams::o);
  call.optional_dlse(arrays.dlse);
  call.scratch(kBufferDRow, "d_row", params.B * params.H * params.Tq);
  // The fused kernels write what the materialized ones add to.
  const Access access = accumulate ? Access::kAddToContent
                        : is_fused ? Access::kWrite
                                   : Access::kAddToZero;
  add_dq(call, access, arrays);
  add_dkv(call, access, arrays);
  const bool has_dlse = arrays.dlse != nullptr;
  if (is_fused) {
    call.per_row(kBufferRowMax, "row_max", Access::kRead, arrays.stats.row_max);
    call.per_row(kBufferRowSum, "row_sum", Access::kRead, arrays.stats.row_sum);
    return call.run({fused::bwd_d(params, has_dlse), fused::bwd_dq(params, accumulate),
                     fused::bwd_dkv(params, accumulate)});
  }
  call.per_row(kBufferP, "probs", Access::kRead, arrays.p, params.Tk);
  return call.run({materialized::bwd_d(params, has_dlse), materialized::bwd_dq(params),
                   materialized::bwd_dkv(params)});
}

Ran run_kernel(BackwardKernel kernel, const Problem& problem, const BackwardArrays<float>& arrays,
               const OwnedMemory& owned) {
  const AutoreleasePool pool;
  Call call(problem, owned);
  const AttnParams& params = call.params();
  if (kernel == BackwardKernel::kD) {
    call.query_like(kBufferO, "o", Access::kRead, arrays.o, &AttnParams::o);
    call.query_like(kBufferDout, "dout", Access::kRead, arrays.dout, &AttnParams::dout);
    call.optional_dlse(arrays.dlse);
    call.per_row(kBufferDRow, "d_row", Access::kWrite, arrays.d_row);
    return call.run({materialized::bwd_d(params, arrays.dlse != nullptr)});
  }
  add_backward_inputs(call, arrays);
  call.per_row(kBufferP, "p", Access::kRead, arrays.p, params.Tk);
  call.per_row(kBufferDRow, "d_row", Access::kRead, arrays.d_row);
  if (kernel == BackwardKernel::kDq) {
    add_dq(call, Access::kAddToContent, arrays);
    return call.run({materialized::bwd_dq(params)});
  }
  add_dkv(call, Access::kAddToContent, arrays);
  return call.run({materialized::bwd_dkv(params)});
}

}  // namespace forge::metal
