#include "bindings/attention.h"

#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/options.h"
#include "bindings/plain_calls.h"
#include "bindings/without_gil.h"
#include "core/cpu_target.h"
#include "core/errors.h"
#include "core/validate.h"
#include "dispatch/backend.h"
#include "dispatch/metal_backend.h"

namespace py = pybind11;

namespace forge::bindings {
namespace {

constexpr std::array<const char*, kPasses> kPassNames = {"forward", "backward", "bwd_d", "bwd_dq",
                                                         "bwd_dkv"};

DType dtype_of(const std::string& dtype, const std::string& name) {
  for (const DType known : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16}) {
    if (dtype == dtype_name(known)) return known;
  }
  throw TypeError(name + " must be float32, float64, float16 or bfloat16, got " + dtype);
}

Pass pass_of(const std::string& name) {
  for (std::size_t pass = 0; pass < kPassNames.size(); ++pass) {
    if (name == kPassNames[pass]) return static_cast<Pass>(pass);
  }
  throw std::invalid_argument(
      "call must be 'forward', 'backward', 'bwd_d', 'bwd_dq' or 'bwd_dkv', "
      "got '" +
      name + "'");
}

// Takes the arrays that the call reads or writes, by the names in the table of operands, each as
// `take` makes an Operand of it.
template <typename Take>
void take_arrays(const py::dict& given, Problem& problem, Take&& take) {
  if (problem.family == Family::kMaterialized && given.contains("rounded")) {
    throw std::invalid_argument(
        "rounded must be left out for kernel='materialized', which takes no half precision; got "
        "an array");
  }
  for (const OperandInfo& info : operand_table()) {
    const Use use = use_of(info, problem);
    if (use == Use::kNone) continue;
    if (given.contains(info.name)) {
      problem.operands[info.slot] = take(given[info.name], info.name);
    } else if (!is_optional(use)) {
      throw std::invalid_argument(std::string(info.name) + " must be given for kernel='" +
                                  family_name(problem.family) + "'");
    }
  }
}

// The array of these axes from which the problem has its sizes.
const Operand* first_of(Axes axes, const Problem& problem, const char*& name) {
  for (const OperandInfo& info : operand_table()) {
    if (info.axes != axes || use_of(info, problem) == Use::kNone) continue;
    name = info.name;
    return &problem.operands[info.slot];
  }
  return nullptr;
}

Int32 head_count(Int64 value, const char* name) {
  if (value > 0x7fffffff) {
    throw std::invalid_argument(std::string(name) + " must be below 2**31, got " +
                                std::to_string(value));
  }
  return static_cast<Int32>(value);
}

void require_rank4(const Operand& operand, const char* name) {
  if (operand.ndim != 4) {
    throw std::invalid_argument(std::string(name) + " must be [B, T, heads, hd], got " +
                                std::to_string(operand.ndim) + " axes");
  }
}

void set_sizes(Problem& problem) {
  const char* name = "";
  const Operand* queries = first_of(Axes::kQueryHeads, problem, name);
  if (queries == nullptr) queries = first_of(Axes::kOutputHeads, problem, name);
  require_rank4(*queries, name);
  problem.dtype = queries->dtype;
  problem.B = queries->shape[0];
  problem.Tq = queries->shape[1];
  problem.H = head_count(queries->shape[2], "num_heads");
  problem.hd = head_count(queries->shape[3], "head dim");
  const Operand* keys = first_of(Axes::kKeyHeads, problem, name);
  if (keys == nullptr) keys = queries;  // they play no part
  require_rank4(*keys, name);
  const Operand* values = first_of(Axes::kValueHeads, problem, name);
  if (values == nullptr) values = queries;
  require_rank4(*values, name);
  problem.hv = head_count(values->shape[3], "head dim");
  problem.kv_dtype = keys->dtype;
  problem.Tk = keys->shape[1];
  problem.Hkv = head_count(keys->shape[2], "num_kv_heads");
}

// Checks everything. Memory is taken for key ranges only where there is something to write, however
// large a batch without rows claims to be.
void check(const Options& options, Problem& problem) {
  bool nothing_to_write = true;
  for (const OperandInfo& info : operand_table()) {
    const Use use = use_of(info, problem);
    const Operand& operand = problem.operands[info.slot];
    if (use == Use::kNone || (is_optional(use) && operand.data == nullptr)) continue;
    check_operand(info, problem);
    nothing_to_write = nothing_to_write && (!is_written(use) || is_empty(operand));
  }
  if (options.ranges.is_none() && nothing_to_write) problem.B = 0;
  set_options(options, problem);
  check_problem(problem);
}

template <typename Take>
Problem problem_of(const std::string& pass, const py::dict& arrays, bool accumulate,
                   Options& options, Take&& take) {
  choose_cpu_target(options.cpu_target);  // a wrong name is wrong on every backend
  Problem problem;
  problem.pass = pass_of(pass);
  problem.family = family_of(options);
  problem.accumulate = accumulate;
  const bool whole = problem.pass == Pass::kForward || problem.pass == Pass::kBackward;
  if (!whole && problem.family != Family::kMaterialized) {
    throw std::invalid_argument("kernel must be 'materialized' for call '" + pass +
                                "', got 'fused'");
  }
  if (problem.pass == Pass::kBwdD) options.ranges = py::none();  // keys play no part
  take_arrays(arrays, problem, take);
  set_sizes(problem);
  check(options, problem);
  return problem;
}

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

py::dict run(const std::string& pass, const py::dict& arrays, bool accumulate,
             const py::dict& given_options) {
  // A copy of the dict: it keeps the arrays alive, whatever other threads do to the caller's.
  const py::dict given = arrays.attr("copy")();
  Options options = options_of(given_options);
  const Problem problem = problem_of(pass, given, accumulate, options, operand_of);
  const BackendChoice choice = choose_backend(problem, options.backend);
  const RunInfo info =
      without_gil([&] { return choice.backend->run(problem, options.cpu_target); });
  return as_dict(info, choice);
}

// An array that a framework binds to a kernel: (dtype, shape, strides, bytes from where its buffer
// starts).
Operand described_operand(const py::handle& object, const std::string& name) {
  const auto [dtype, shape, strides, offset] =
      object.cast<std::tuple<std::string, std::vector<Int64>, std::vector<Int64>, Int64>>();
  if (shape.size() > 4 || strides.size() != shape.size() || offset < 0) {
    throw std::invalid_argument(name + " must have at most 4 axes, and a stride for each");
  }
  Operand operand;
  operand.dtype = dtype_of(dtype, name);
  // No address that anybody reads at: its distance from a page is the offset, and it is not null.
  operand.data = reinterpret_cast<void*>(static_cast<std::uintptr_t>(offset) + 4096);
  operand.writeable = true;
  operand.ndim = static_cast<int>(shape.size());
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    operand.shape[axis] = shape[axis];
    operand.strides[axis] = shape[axis] < 2 ? 0 : strides[axis];
  }
  return operand;
}

py::dict plan_stream(const std::string& pass, const py::dict& arrays, const py::dict& given_options,
                     bool cut) {
  forget_plain_run();
  Options options = options_of(given_options);
  const metal::StreamPlan plan =
      plan_metal_stream(problem_of(pass, arrays, false, options, described_operand), cut);
  py::list dispatches;
  for (const metal::StreamDispatch& dispatch : plan.dispatches) {
    py::dict entry;
    entry["kernel"] = dispatch.kernel;
    entry["switches"] = py::tuple(py::cast(dispatch.switches));
    entry["groups"] = py::tuple(py::cast(dispatch.groups));
    entry["threads"] = dispatch.threads;
    entry["grid"] = dispatch.grid;
    entry["begins_another"] = dispatch.begins_another;
    dispatches.append(entry);
  }
  py::dict scratch;
  for (const auto& [name, floats] : plan.scratch) scratch[name] = floats;
  py::dict result;
  result["params"] = plan.params;
  result["ranges"] = plan.ranges;
  result["scratch"] = scratch;
  result["dispatches"] = dispatches;
  return result;
}

}  // namespace

void register_attention(py::module_& module) {
  module.def("run", &run, py::arg("call"), py::arg("arrays"), py::arg("accumulate"),
             py::arg("options"));
  module.def("plan_stream", &plan_stream, py::arg("call"), py::arg("arrays"), py::arg("options"),
             py::arg("cut"));
  module.def("shader_text", [] { return std::string(metal::shader_text()); });
}

}  // namespace forge::bindings
