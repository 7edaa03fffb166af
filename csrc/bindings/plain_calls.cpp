#include "bindings/plain_calls.h"

#include <pybind11/numpy.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <optional>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/options.h"
#include "bindings/plain_arrays.h"
#include "bindings/without_gil.h"
#include "core/cpu_target.h"
#include "core/thread_pool.h"
#include "core/validate.h"
#include "dispatch/backend.h"
#include "dispatch/cpu_backend.h"

namespace py = pybind11;

namespace forge::bindings {
namespace {

// In all. Larger results are worth asking the system about its memory first, which the Python layer
// does.
constexpr Int64 kMostFloats = Int64{16} << 20;

// rows is the size of an array and no overflow; floats_each is a size or two of one axis.
bool is_small(Int64 rows, Int64 floats_each) { return rows <= kMostFloats / floats_each; }

// What the last plain call of this thread ran on. Kept in numbers: a record in words is made when
// it is asked for.
struct PlainRun {
  bool valid = false;
  bool backward = false;
  bool names_backend = false;
  CpuTarget target = CpuTarget::kBaseline;
  int threads = 1;
};
thread_local PlainRun last_run;

bool int_of(PyObject* object, Int64& value) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0;
}

bool real_of(PyObject* object, double& value) {
  if (PyFloat_Check(object)) {  // NumPy's float64 is one
    value = PyFloat_AS_DOUBLE(object);
    return true;
  }
  Int64 number = 0;
  if (!int_of(object, number)) return false;
  value = static_cast<double>(number);
  return true;
}

bool bool_of(PyObject* object, bool& value) {
  value = object == Py_True;
  return PyBool_Check(object);
}

bool window_of(PyObject* object, Int64& left, Int64& right) {
  left = right = -1;
  if (object == Py_None) return true;
  if (PyTuple_CheckExact(object)) {
    return PyTuple_GET_SIZE(object) == 2 && int_of(PyTuple_GET_ITEM(object, 0), left) &&
           int_of(PyTuple_GET_ITEM(object, 1), right);
  }
  if (!int_of(object, left) || left < 1) return false;
  --left;
  return true;
}

bool is_text(PyObject* object, const char* text) {
  return PyUnicode_CheckExact(object) && PyUnicode_CompareWithASCIIString(object, text) == 0;
}

bool is_set(const char* variable) {
  const char* text = std::getenv(variable);
  return text != nullptr && *text != '\0';
}

// Whether the CPU is what the call would run on: named, or first of those that could serve.
bool runs_on_cpu(PyObject* backend) {
  if (is_set("FORGE_CPU_TARGET")) return false;
  if (backend != Py_None) return is_text(backend, "cpu");
  if (is_set("FORGE_BACKEND")) return false;
  static const bool alone = std::strcmp(FORGE_METAL_MODE, "off") == 0;
  return alone;
}

// The arguments of forge.attention, in its order.
enum Argument {
  kQ,
  kK,
  kV,
  kCausal,
  kWindow,
  kSoftcap,
  kScale,
  kQueryOffset,
  kKeyStart,
  kKeyEnd,
  kBias,
  kMask,
  kSinks,
  kNumHeads,
  kNumKvHeads,
  kKernel,
  kBackend,
  kOut,
  kArguments
};

bool ranges_of_call(PyObject* const* given, Problem& problem) {
  AttnRange range = {problem.Tk - problem.Tq, 0, problem.Tk};
  const auto position = [&](Argument at, Int64& value) {
    return given[at] == Py_None || int_of(given[at], value);
  };
  if (!position(kQueryOffset, range.query_offset) || !position(kKeyStart, range.key_start) ||
      !position(kKeyEnd, range.key_end)) {
    return false;
  }
  const bool counts =
      problem.window_left >= 0 || problem.window_right >= 0 || (problem.causal && problem.Tq > 1);
  if (given[kKeyEnd] != Py_None && given[kQueryOffset] == Py_None && counts &&
      problem.Tq != problem.Tk) {
    return false;  // two readings
  }
  problem.ranges.assign(static_cast<std::size_t>(problem.B), range);
  return true;
}

bool options_of_call(PyObject* const* given, Problem& problem) {
  problem.scale = 1 / std::sqrt(static_cast<double>(problem.hd));
  problem.softcap = 0;
  return bool_of(given[kCausal], problem.causal) &&
         window_of(given[kWindow], problem.window_left, problem.window_right) &&
         (given[kSoftcap] == Py_None || real_of(given[kSoftcap], problem.softcap)) &&
         (given[kScale] == Py_None || real_of(given[kScale], problem.scale)) &&
         (given[kKernel] == Py_None || is_text(given[kKernel], "fused"));
}

void set_sizes(const HeadsView& q, const HeadsView& k, const HeadsView& v, Problem& problem) {
  problem.B = q.B();
  problem.Tq = q.T();
  problem.Tk = k.T();
  problem.H = static_cast<Int32>(q.H());
  problem.Hkv = static_cast<Int32>(k.H());
  problem.hd = problem.hv = static_cast<Int32>(q.hd());
  problem.operands[kBufferQ] = q.heads;
  problem.operands[kBufferK] = k.heads;
  problem.operands[kBufferV] = v.heads;
}

bool is_valid(const Problem& problem) {
  if (!cpu_backend().supports(problem).ok) return false;
  try {
    check_problem(problem);
    return true;
  } catch (const std::exception&) {
    return false;  // the Python layer finds the words
  }
}

void record(bool backward, bool names_backend, CpuTarget target) {
  last_run = {true, backward, names_backend, target, num_threads()};
}

// What attention_backward takes, as the Python layer would have put it together.
py::dict options_dict(const Problem& problem, bool has_ranges, bool names_backend) {
  py::dict options;
  options["causal"] = problem.causal;
  options["window"] = py::make_tuple(problem.window_left, problem.window_right);
  options["softcap"] = problem.softcap;
  options["scale"] = problem.scale;
  options["ranges"] = has_ranges ? ranges_array(problem.ranges) : py::object(py::none());
  options["kernel"] = "fused";
  options["backend"] = names_backend ? "cpu" : "";
  options["cpu_target"] = "";
  return options;
}

struct Forward {
  Problem problem;
  HeadsView q;
};

std::optional<Forward> plain_forward(PyObject* const* given) {
  for (const Argument array : {kBias, kMask, kSinks, kOut}) {
    if (given[array] != Py_None) return std::nullopt;
  }
  if (!runs_on_cpu(given[kBackend])) return std::nullopt;
  Int64 heads = 0, kv_heads = 0;
  if (given[kNumHeads] != Py_None && !int_of(given[kNumHeads], heads)) return std::nullopt;
  kv_heads = heads;
  if (given[kNumKvHeads] != Py_None && !int_of(given[kNumKvHeads], kv_heads)) return std::nullopt;
  const auto q = heads_view(given[kQ], heads);
  const auto k = heads_view(given[kK], kv_heads);
  const auto v = heads_view(given[kV], kv_heads);
  if (!q || !k || !v || !fit_together(*q, *k, *v)) return std::nullopt;
  if (q->ndim == 4 && (given[kNumHeads] != Py_None || given[kNumKvHeads] != Py_None)) {
    return std::nullopt;
  }
  if (!is_small(q->rows(), q->hd() + 2)) return std::nullopt;
  Forward forward;
  forward.q = *q;
  set_sizes(*q, *k, *v, forward.problem);
  if (!options_of_call(given, forward.problem) || !ranges_of_call(given, forward.problem) ||
      !is_valid(forward.problem)) {
    return std::nullopt;
  }
  return forward;
}

// The arguments and the new arrays outlive it.
void run(const Problem& problem, const std::string& cpu_target) {
  without_gil([&] { return cpu_backend().run(problem, cpu_target); });
}

py::object attention(PyObject* const* given) {
  std::optional<Forward> forward = plain_forward(given);
  if (!forward) return py::none();
  const NewArray o = new_heads(forward->q, forward->q.element());
  forward->problem.operands[kBufferO] = o.operand;
  run(forward->problem, "");
  record(false, given[kBackend] != Py_None, usable_cpu_targets().front());
  return o.object;
}

py::object attention_forward(PyObject* const* given) {
  std::optional<Forward> forward = plain_forward(given);
  if (!forward) return py::none();
  Problem& problem = forward->problem;
  const NewArray o = new_heads(forward->q, float32_elements());
  NewArray returned = o;
  if (is_half(forward->q.heads.dtype)) {
    returned = new_heads(forward->q, forward->q.element());
    problem.operands[kBufferRounded] = returned.operand;
  }
  const NewArray row_max = new_rows(forward->q), row_sum = new_rows(forward->q);
  problem.operands[kBufferO] = o.operand;
  problem.operands[kBufferRowMax] = row_max.operand;
  problem.operands[kBufferRowSum] = row_sum.operand;
  run(problem, "");
  const bool names_backend = given[kBackend] != Py_None;
  record(false, names_backend, usable_cpu_targets().front());
  const bool has_ranges =
      given[kQueryOffset] != Py_None || given[kKeyStart] != Py_None || given[kKeyEnd] != Py_None;
  return py::make_tuple(returned.object, o.object, row_max.object, row_sum.object,
                        options_dict(problem, has_ranges, names_backend),
                        py::make_tuple(problem.B, problem.Tq, problem.Tk, problem.H, problem.Hkv,
                                       problem.hd, problem.hv));
}

// The arrays as they were given and saved.
enum SavedArgument {
  kSavedDout,
  kSavedQ,
  kSavedK,
  kSavedV,
  kSavedO,
  kSavedRowMax,
  kSavedRowSum,
  kSavedNumHeads,
  kSavedNumKvHeads,
  kSavedOptions,
  kSavedArguments
};

py::object attention_backward(PyObject* const* given) {
  if (!PyDict_CheckExact(given[kSavedOptions])) return py::none();
  Int64 heads = 0, kv_heads = 0;
  if (!int_of(given[kSavedNumHeads], heads) || !int_of(given[kSavedNumKvHeads], kv_heads)) {
    return py::none();
  }
  const auto q = heads_view(given[kSavedQ], heads);
  const auto k = heads_view(given[kSavedK], kv_heads);
  const auto v = heads_view(given[kSavedV], kv_heads);
  if (!q || !k || !v || !fit_together(*q, *k, *v)) return py::none();
  const auto o = heads_view(given[kSavedO], q->H());
  const auto dout = heads_view(given[kSavedDout], q->H());
  if (!o || !dout || dout->ndim != q->ndim || !same_shape(*o, *q) || !same_shape(*dout, *q) ||
      o->heads.dtype != DType::kFloat32 || dout->heads.dtype != q->heads.dtype) {
    return py::none();
  }
  const auto row_max = row_statistics(given[kSavedRowMax], *q);
  const auto row_sum = row_statistics(given[kSavedRowSum], *q);
  const bool small = is_small(q->rows(), 2 * q->hd()) && is_small(k->rows(), 4 * k->hd());
  if (!row_max || !row_sum || !small) return py::none();
  const Options options = options_of(py::reinterpret_borrow<py::dict>(given[kSavedOptions]));
  if (options.kernel != "fused") return py::none();
  Problem problem;
  problem.pass = Pass::kBackward;
  set_sizes(*q, *k, *v, problem);
  set_options(options, problem);
  if (!is_valid(problem)) return py::none();
  const NewArray dq = new_heads(*q, q->element());
  const NewArray dk = new_heads(*k, k->element()), dv = new_heads(*v, v->element());
  Operands& operands = problem.operands;
  operands[kBufferO] = o->heads;
  operands[kBufferDout] = dout->heads;
  operands[kBufferRowMax] = *row_max;
  operands[kBufferRowSum] = *row_sum;
  operands[kBufferDq] = dq.operand;
  operands[kBufferDk] = dk.operand;
  operands[kBufferDv] = dv.operand;
  run(problem, options.cpu_target);
  record(true, true, choose_cpu_target(options.cpu_target));
  return py::make_tuple(dq.object, dk.object, dv.object);
}

// A function of so many positional arguments, without what pybind11 adds to a call.
template <py::object (*Function)(PyObject* const*), int Arguments>
PyObject* call(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != Arguments) {
    return PyErr_Format(PyExc_TypeError, "%d arguments must be given, got %zd", Arguments, count);
  }
  try {
    return Function(given).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

py::object last_plain_run() {
  if (!last_run.valid) return py::none();
  py::dict result, passed_over, arrays;
  for (const Backend* backend : backends()) {
    if (last_run.names_backend || backend == &cpu_backend()) break;
    passed_over[backend->name()] = backend->available().reason;
  }
  for (const char* name : {"q", "k", "v"}) arrays[name] = "in place";
  if (last_run.backward) arrays["dout"] = "in place";
  result["backend"] = "cpu";
  for (const char* name : {"kernel", "requested_kernel"}) result[name] = "fused";
  result["cpu_target"] = cpu_target_name(last_run.target);
  result["threads"] = last_run.threads;
  for (const char* name : {"device", "library"}) result[name] = "";
  result["arrays"] = arrays;
  result["passed_over"] = passed_over;
  return result;
}

template <py::object (*Function)(PyObject* const*), int Arguments>
void add(py::module_& module, const char* name) {
  static PyMethodDef method = {
      name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call<Function, Arguments>)),
      METH_FASTCALL, nullptr};
  module.add_object(name, py::reinterpret_steal<py::object>(PyCFunction_New(&method, nullptr)));
}

}  // namespace

void forget_plain_run() { last_run.valid = false; }

void register_plain_calls(py::module_& module) {
  add<attention, kArguments>(module, "attention");
  add<attention_forward, kArguments>(module, "attention_forward");
  add<attention_backward, kSavedArguments>(module, "attention_backward");
  module.def("last_plain_run", &last_plain_run);
}

}  // namespace forge::bindings
