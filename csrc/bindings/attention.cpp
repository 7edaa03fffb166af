#include "bindings/attention.h"

#include <array>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "bindings/arrays.h"
#include "bindings/options.h"
#include "bindings/plain_calls.h"
#include "bindings/without_gil.h"
#include "core/cpu_target.h"
#include "core/errors.h"
#include "dispatch/backend.h"

namespace py = pybind11;

namespace forge::bindings {
namespace {

Int32 head_count(std::int64_t value, const char* name) {
  if (value > 0x7fffffff) {
    throw std::invalid_argument(std::string(name) + " must be below 2**31, got " +
                                std::to_string(value));
  }
  return static_cast<Int32>(value);
}

void require_rank4(const ArrayView& view) {
  if (view.shape.size() != 4) {
    throw std::invalid_argument(view.name + " must be [B, T, heads, hd], got " +
                                std::to_string(view.shape.size()) + " axes");
  }
}

Family family_of(const std::string& kernel) {
  if (kernel == "fused") return Family::kFused;
  if (kernel == "materialized") return Family::kMaterialized;
  throw std::invalid_argument("kernel must be 'fused' or 'materialized', got '" + kernel + "'");
}

// Collects the problem while it checks the arrays against one another.
class Call {
 public:
  // query-like: any array of q's shape; key-like: any of k's.
  Call(const ArrayView& query_like, const ArrayView& key_like, const Options& options) {
    require_rank4(query_like);
    require_rank4(key_like);
    AttnParamsOf<double>& params = problem.params;
    problem.dtype = query_like.dtype;
    problem.family = family_of(options.kernel);
    choose_cpu_target(options.cpu_target);  // a wrong name is wrong on every backend
    params.B = query_like.shape[0];
    params.Tq = query_like.shape[1];
    params.H = head_count(query_like.shape[2], "num_heads");
    params.hd = head_count(query_like.shape[3], "head dim");
    params.Tk = key_like.shape[1];
    params.Hkv = head_count(key_like.shape[2], "num_kv_heads");
  }

  // When all arrays are checked: what is written must be writeable, and memory is taken for key
  // ranges only where there is something to write, however large a batch without rows claims to be.
  void finish(const Options& options, std::initializer_list<const ArrayView*> outputs) {
    AttnParamsOf<double>& params = problem.params;
    bool nothing_to_write = true;
    for (const ArrayView* output : outputs) {
      check_output(*output);
      owned.push_back(output->owner);
      nothing_to_write = nothing_to_write && is_empty(*output);
    }
    if (options.ranges.is_none() && nothing_to_write) params.B = 0;
    set_options(options, problem);
    check_problem(problem);
  }

  AttnStrides query_like(const ArrayView& view) const {
    const AttnParamsOf<double>& params = problem.params;
    return check_heads_array(view, {params.B, params.Tq, params.H, params.hd}, problem.dtype);
  }
  AttnStrides key_like(const ArrayView& view) const {
    const AttnParamsOf<double>& params = problem.params;
    return check_heads_array(view, {params.B, params.Tk, params.Hkv, params.hd}, problem.dtype);
  }
  void row_stat(const ArrayView& view) const {
    const AttnParamsOf<double>& params = problem.params;
    check_contiguous_array(view, {params.B, params.H, params.Tq}, problem.dtype);
  }
  void probs(const ArrayView& view) const {
    const AttnParamsOf<double>& params = problem.params;
    check_contiguous_array(view, {params.B, params.H, params.Tq, params.Tk}, problem.dtype);
  }

  Problem problem;
  std::vector<MemoryBlock> owned;  // of the outputs
};

py::dict as_dict(const RunInfo& info, const BackendChoice& choice) {
  forget_plain_run();
  py::dict passed_over;
  for (const auto& [name, reason] : choice.passed_over) passed_over[name.c_str()] = reason;
  py::dict result;
  result["backend"] = info.backend;
  result["kernel"] = info.kernel;
  result["cpu_target"] = info.cpu_target;
  result["threads"] = info.threads;
  result["device"] = info.device;
  result["library"] = info.library;
  py::dict arrays;
  for (const auto& [name, how] : info.arrays) arrays[name.c_str()] = how;
  result["arrays"] = arrays;
  result["passed_over"] = passed_over;
  return result;
}

// An optional array: its view where given, else one without data.
ArrayView optional_view(const py::object& object, const std::string& name) {
  return object.is_none() ? ArrayView{} : view_of(object, name);
}

// Fills the member for the problem's dtype through `fill`, which takes ForwardArrays<Real>& or
// BackwardArrays<Real>& and a function from views to Real pointers.
template <typename Buffers, typename Fill>
Buffers typed(DType dtype, Fill&& fill) {
  Buffers buffers;
  if (dtype == DType::kFloat32) {
    fill(buffers.f32, [](const ArrayView& view) { return static_cast<float*>(view.data); });
  } else {
    fill(buffers.f64, [](const ArrayView& view) { return static_cast<double*>(view.data); });
  }
  return buffers;
}

// Holds the views of one call, checked, with the problem they make.
struct ForwardCall {
  ArrayView q, k, v, o, p, row_max, row_sum;
  Call call;
  ForwardBuffers buffers;

  ForwardCall(const std::array<py::object, 7>& arrays, const Options& options)
      : q(view_of(arrays[0], "q")),
        k(view_of(arrays[1], "k")),
        v(view_of(arrays[2], "v")),
        o(view_of(arrays[3], "o")),
        p(optional_view(arrays[4], "p")),
        row_max(view_of(arrays[5], "row_max")),
        row_sum(view_of(arrays[6], "row_sum")),
        call(q, k, options) {
    AttnParamsOf<double>& params = call.problem.params;
    params.q = call.query_like(q);
    params.k = call.key_like(k);
    params.v = call.key_like(v);
    params.o = call.query_like(o);
    if (call.problem.family == Family::kMaterialized) {
      if (p.name.empty()) throw std::invalid_argument("p must be given for kernel='materialized'");
      call.probs(p);
    }
    call.row_stat(row_max);
    call.row_stat(row_sum);
    if (p.name.empty()) {
      call.finish(options, {&o, &row_max, &row_sum});
    } else {
      call.finish(options, {&o, &p, &row_max, &row_sum});
    }
    buffers = typed<ForwardBuffers>(call.problem.dtype, [&](auto& to, auto pointer) {
      to.q = pointer(q);
      to.k = pointer(k);
      to.v = pointer(v);
      to.o = pointer(o);
      to.p = pointer(p);
      to.stats = {pointer(row_max), pointer(row_sum)};
    });
    buffers.owned = call.owned;
  }
};

py::dict run_forward(const ForwardCall& forward, const Options& options) {
  const BackendChoice choice = choose_backend(forward.call.problem, options.backend);
  const RunInfo info = without_gil([&] {  // the arguments keep the arrays alive
    return choice.backend->forward(forward.call.problem, forward.buffers, options.cpu_target);
  });
  return as_dict(info, choice);
}

py::dict attention_fwd(py::object q, py::object k, py::object v, py::object o, py::object p,
                       py::object row_max, py::object row_sum, const py::dict& given) {
  const Options options = options_of(given);
  return run_forward(ForwardCall({q, k, v, o, p, row_max, row_sum}, options), options);
}

void require_float32(const ArrayView& view) {
  if (view.dtype != DType::kFloat32) throw TypeError(view.name + " must be float32, got float64");
}

py::dict attention_fwd_f32(py::object q, py::object k, py::object v, py::object o, py::object p,
                           py::object row_max, py::object row_sum, const py::dict& given) {
  const Options options = materialized_options_of(given);
  const ForwardCall forward({q, k, v, o, p, row_max, row_sum}, options);
  require_float32(forward.q);
  return run_forward(forward, options);
}

// Inputs and outputs of a backward call, in a dict: which are needed depends on the kernel.
struct BackwardCall {
  ArrayView q, k, v, o, p, row_max, row_sum, dout, dlse, d_row, dq, dk, dv;
  BackwardBuffers buffers;

  void fill(const Call& call) {
    buffers = typed<BackwardBuffers>(call.problem.dtype, [&](auto& to, auto pointer) {
      to.q = pointer(q);
      to.k = pointer(k);
      to.v = pointer(v);
      to.o = pointer(o);
      to.dout = pointer(dout);
      to.dlse = pointer(dlse);
      to.p = pointer(p);
      to.stats = {pointer(row_max), pointer(row_sum)};
      to.d_row = pointer(d_row);
      to.dq = pointer(dq);
      to.dk = pointer(dk);
      to.dv = pointer(dv);
    });
    buffers.owned = call.owned;
  }
};

py::dict run_kernel(BackwardKernel kernel, const Call& call, const BackwardCall& arrays,
                    const Options& options) {
  const BackendChoice choice = choose_backend(call.problem, options.backend);
  const RunInfo info = without_gil([&] {  // the arguments keep the arrays alive
    return choice.backend->run_kernel(kernel, call.problem, arrays.buffers, options.cpu_target);
  });
  return as_dict(info, choice);
}

// Checks q, k, v and dout and sets their strides.
void take_inputs(Call& call, const BackwardCall& arrays) {
  AttnParamsOf<double>& params = call.problem.params;
  params.q = call.query_like(arrays.q);
  params.k = call.key_like(arrays.k);
  params.v = call.key_like(arrays.v);
  params.dout = call.query_like(arrays.dout);
}

py::dict attention_bwd(const py::dict& arrays_given, bool accumulate,
                       const py::dict& given_options) {
  // A copy of the dict: it keeps the arrays alive, whatever other threads do to the caller's.
  const py::dict given = arrays_given.attr("copy")();
  const Options options = options_of(given_options);
  const auto required = [&](const char* name) {
    if (!given.contains(name)) throw std::invalid_argument(std::string(name) + " must be given");
    return view_of(given[name], name);
  };
  BackwardCall arrays;
  arrays.q = required("q");
  arrays.k = required("k");
  arrays.v = required("v");
  arrays.o = required("o");
  arrays.dout = required("dout");
  arrays.dq = required("dq");
  arrays.dk = required("dk");
  arrays.dv = required("dv");
  arrays.row_max = required("row_max");
  arrays.row_sum = required("row_sum");
  Call call(arrays.q, arrays.k, options);
  AttnParamsOf<double>& params = call.problem.params;
  take_inputs(call, arrays);
  params.o = call.query_like(arrays.o);
  params.dq = call.query_like(arrays.dq);
  params.dk = call.key_like(arrays.dk);
  params.dv = call.key_like(arrays.dv);
  call.row_stat(arrays.row_max);
  call.row_stat(arrays.row_sum);
  if (call.problem.family == Family::kMaterialized) {
    arrays.p = required("p");
    call.probs(arrays.p);
  }
  if (given.contains("dlse")) {
    arrays.dlse = required("dlse");
    call.row_stat(arrays.dlse);
  }
  call.finish(options, {&arrays.dq, &arrays.dk, &arrays.dv});
  arrays.fill(call);
  const BackendChoice choice = choose_backend(call.problem, options.backend);
  const RunInfo info = without_gil([&] {  // the arguments keep the arrays alive
    return choice.backend->backward(call.problem, arrays.buffers, accumulate, options.cpu_target);
  });
  return as_dict(info, choice);
}

py::dict attention_bwd_d_f32(py::object o, py::object dout, py::object dlse, py::object d_row,
                             const py::dict& given) {
  Options options = materialized_options_of(given);
  options.ranges = py::none();
  BackwardCall arrays;
  arrays.o = view_of(o, "o");
  arrays.dout = view_of(dout, "dout");
  arrays.dlse = optional_view(dlse, "dlse");
  arrays.d_row = view_of(d_row, "d_row");
  require_float32(arrays.o);
  Call call(arrays.o, arrays.o, options);  // keys play no part
  call.problem.params.o = call.query_like(arrays.o);
  call.problem.params.dout = call.query_like(arrays.dout);
  if (!arrays.dlse.name.empty()) call.row_stat(arrays.dlse);
  call.row_stat(arrays.d_row);
  call.finish(options, {&arrays.d_row});
  arrays.fill(call);
  return run_kernel(BackwardKernel::kD, call, arrays, options);
}

// What the dq and the dk/dv kernel have in common.
Call backward_kernel_call(BackwardCall& arrays, const std::array<py::object, 6>& inputs,
                          const Options& options) {
  arrays.q = view_of(inputs[0], "q");
  arrays.k = view_of(inputs[1], "k");
  arrays.v = view_of(inputs[2], "v");
  arrays.p = view_of(inputs[3], "p");
  arrays.dout = view_of(inputs[4], "dout");
  arrays.d_row = view_of(inputs[5], "d_row");
  require_float32(arrays.q);
  Call call(arrays.q, arrays.k, options);
  take_inputs(call, arrays);
  call.probs(arrays.p);
  call.row_stat(arrays.d_row);
  return call;
}

py::dict attention_bwd_dq_f32(py::object q, py::object k, py::object v, py::object p,
                              py::object dout, py::object d_row, py::object dq,
                              const py::dict& given) {
  const Options options = materialized_options_of(given);
  BackwardCall arrays;
  Call call = backward_kernel_call(arrays, {q, k, v, p, dout, d_row}, options);
  arrays.dq = view_of(dq, "dq");
  call.problem.params.dq = call.query_like(arrays.dq);
  call.finish(options, {&arrays.dq});
  arrays.fill(call);
  return run_kernel(BackwardKernel::kDq, call, arrays, options);
}

py::dict attention_bwd_dkv_f32(py::object q, py::object k, py::object v, py::object p,
                               py::object dout, py::object d_row, py::object dk, py::object dv,
                               const py::dict& given) {
  const Options options = materialized_options_of(given);
  BackwardCall arrays;
  Call call = backward_kernel_call(arrays, {q, k, v, p, dout, d_row}, options);
  arrays.dk = view_of(dk, "dk");
  arrays.dv = view_of(dv, "dv");
  call.problem.params.dk = call.key_like(arrays.dk);
  call.problem.params.dv = call.key_like(arrays.dv);
  call.finish(options, {&arrays.dk, &arrays.dv});
  arrays.fill(call);
  return run_kernel(BackwardKernel::kDkv, call, arrays, options);
}

}  // namespace

void register_attention(py::module_& module) {
  module.def("attention_fwd", &attention_fwd, py::arg("q"), py::arg("k"), py::arg("v"),
             py::arg("o"), py::arg("p"), py::arg("row_max"), py::arg("row_sum"),
             py::arg("options"));
  module.def("attention_bwd", &attention_bwd, py::arg("arrays"), py::arg("accumulate"),
             py::arg("options"));
  module.def("attention_fwd_f32", &attention_fwd_f32, py::arg("q"), py::arg("k"), py::arg("v"),
             py::arg("o"), py::arg("p"), py::arg("row_max"), py::arg("row_sum"),
             py::arg("options"));
  module.def("attention_bwd_d_f32", &attention_bwd_d_f32, py::arg("o"), py::arg("dout"),
             py::arg("dlse"), py::arg("d_row"), py::arg("options"));
  module.def("attention_bwd_dq_f32", &attention_bwd_dq_f32, py::arg("q"), py::arg("k"),
             py::arg("v"), py::arg("p"), py::arg("dout"), py::arg("d_row"), py::arg("dq"),
             py::arg("options"));
  module.def("attention_bwd_dkv_f32", &attention_bwd_dkv_f32, py::arg("q"), py::arg("k"),
             py::arg("v"), py::arg("p"), py::arg("dout"), py::arg("d_row"), py::arg("dk"),
             py::arg("dv"), py::arg("options"));
}

}  // namespace forge::bindings
