#include "metal/attention.h"

#include <algorithm>
#include <exception>
#include <initializer_list>

#include "metal/buffers.h"
#include "metal/command_stream.h"
#include "metal/context.h"

namespace forge::metal {
namespace {

// An upper bound of the keys that a query sees, and of the queries that see a key.
double most_visible(const AttnParams& params, Int64 length) {
  const Int64 right = params.causal ? 0 : params.window_right;
  if (params.window_left < 0 || right < 0) return static_cast<double>(length);
  const double width = static_cast<double>(params.window_left) + static_cast<double>(right) + 1;
  return std::min(width, static_cast<double>(length));
}

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
    switches_.has_dlse = dlse != nullptr;
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

  // The kernels, with what a row of each costs: products over hd, and the polynomials of exp and
  // tanh.
  Kernel fwd() {
    return {"attention_fwd_f32", switched(), query_rows(), keys() * (2.0 * params_.hd + 16)};
  }
  Kernel bwd_d() { return {"attention_bwd_d_f32", switched(), query_rows(), 1.0 * params_.hd}; }
  Kernel bwd_dq() {
    return {"attention_bwd_dq_f32", switched(), query_rows(), keys() * (3.0 * params_.hd + 16)};
  }
  Kernel bwd_dkv() {
    const double queries = most_visible(params_, params_.Tq) * (params_.H / params_.Hkv);
    return {"attention_bwd_dkv_f32", switched(), params_.B * params_.Hkv * params_.Tk,
            queries * (4.0 * params_.hd + 16)};
  }

 private:
  void add(BufferIndex slot, const char* name, Access access, const float* data, Int64 T,
           Int64 heads, AttnStrides AttnParams::* strides) {
    buffers_.add({slot, name, access, const_cast<float*>(data), params_.B, T, heads, params_.hd,
                  &(params_.*strides)});
  }
  Int64 query_rows() const { return params_.B * params_.H * params_.Tq; }
  double keys() const { return most_visible(params_, params_.Tk); }
  Switches switched() {
    switches_.has_softcap = params_.softcap > 0;
    return switches_;
  }

  std::shared_ptr<Context> context_;
  AttnParams params_;
  Switches switches_;
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
  return call.run({call.fwd()});
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
  return call.run({call.bwd_d(), call.bwd_dq(), call.bwd_dkv()});
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
    return call.run({call.bwd_d()});
  }
  add_backward_inputs(call, problem.params.Tk, arrays);
  call.per_row(kBufferDRow, "d_row", Access::kRead, arrays.d_row);
  if (kernel == BackwardKernel::kDq) {
    add_dq(call, Access::kAddToContent, arrays);
    return call.run({call.bwd_dq()});
  }
  add_dkv(call, Access::kAddToContent, arrays);
  return call.run({call.bwd_dkv()});
}

}  // namespace forge::metal
