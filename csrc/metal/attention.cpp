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
  void d_row_of_its_own() {
    buffers_.add_private(kBufferDRow, "d_row", nullptr,
                         static_cast<std::size_t>(query_rows()) * sizeof(float));
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

// What the dq and the dk/dv kernel read.
void add_backward_inputs(Call& call, Int64 Tk, const BackwardArrays<float>& arrays) {
  call.query_like(kBufferQ, "q", Access::kRead, arrays.q, &AttnParams::q);
  call.key_like(kBufferK, "k", Access::kRead, arrays.k, &AttnParams::k);
  call.key_like(kBufferV, "v", Access::kRead, arrays.v, &AttnParams::v);
  call.query_like(kBufferDout, "dout", Access::kRead, arrays.dout, &AttnParams::dout);
  call.per_row(kBufferP, "probs", Access::kRead, arrays.p, Tk);
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

Ran attention_fwd(const Problem& problem, const ForwardArrays<float>& arrays,
                  const OwnedMemory& owned) {
  const AutoreleasePool pool;
  Call call(problem, owned);
  call.query_like(kBufferQ, "q", Access::kRead, arrays.q, &AttnParams::q);
  call.key_like(kBufferK, "k", Access::kRead, arrays.k, &AttnParams::k);
  call.key_like(kBufferV, "v", Access::kRead, arrays.v, &AttnParams::v);
  call.query_like(kBufferO, "out", Access::kWrite, arrays.o, &AttnParams::o);
  call.per_row(kBufferP, "probs", Access::kWrite, arrays.p, problem.params.Tk);
  call.per_row(kBufferRowMax, "row_max", Access::kWrite, arrays.stats.row_max);
  call.per_row(kBufferRowSum, "row_sum", Access::kWrite, arrays.stats.row_sum);
  return call.run({materialized::fwd(call.params())});
}

Ran attention_bwd(const Problem& problem, const BackwardArrays<float>& arrays, bool accumulate,
                  const OwnedMemory& owned) {
  const AutoreleasePool pool;
  const Access access = accumulate ? Access::kAddToContent : Access::kAddToZero;
  Call call(problem, owned);
  add_backward_inputs(call, problem.params.Tk, arrays);
  call.query_like(kBufferO, "out", Access::kRead, arrays.o, &AttnParams::o);
  call.optional_dlse(arrays.dlse);
  call.d_row_of_its_own();
  add_dq(call, access, arrays);
  add_dkv(call, access, arrays);
  return call.run({materialized::bwd_d(call.params(), arrays.dlse != nullptr),
                   materialized::bwd_dq(call.params()), materialized::bwd_dkv(call.params())});
}

Ran run_kernel(BackwardKernel kernel, const Problem& problem, const BackwardArrays<float>& arrays,
               const OwnedMemory& owned) {
  const AutoreleasePool pool;
  Call call(problem, owned);
  if (kernel == BackwardKernel::kD) {
    call.query_like(kBufferO, "o", Access::kRead, arrays.o, &AttnParams::o);
    call.query_like(kBufferDout, "dout", Access::kRead, arrays.dout, &AttnParams::dout);
    call.optional_dlse(arrays.dlse);
    call.per_row(kBufferDRow, "d_row", Access::kWrite, arrays.d_row);
    return call.run({materialized::bwd_d(call.params(), arrays.dlse != nullptr)});
  }
  add_backward_inputs(call, problem.params.Tk, arrays);
  call.per_row(kBufferDRow, "d_row", Access::kRead, arrays.d_row);
  if (kernel == BackwardKernel::kDq) {
    add_dq(call, Access::kAddToContent, arrays);
    return call.run({materialized::bwd_dq(call.params())});
  }
  add_dkv(call, Access::kAddToContent, arrays);
  return call.run({materialized::bwd_dkv(call.params())});
}

}  // namespace forge::metal
