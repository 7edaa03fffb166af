// The compiled module forge._forge.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>

#include "bindings/attention.h"
#include "bindings/dlpack.h"
#include "bindings/plain_calls.h"
#include "core/cpu_target.h"
#include "core/errors.h"
#include "core/thread_pool.h"
#include "dispatch/backend.h"

namespace py = pybind11;

namespace {

py::dict backends() {
  py::dict result;
  for (const forge::Backend* backend : forge::backends()) {
    const forge::Support support = backend->available();
    py::dict entry;
    entry["ok"] = support.ok;
    entry["reason"] = support.reason;
    result[backend->name()] = entry;
  }
  return result;
}

py::dict build_config() {
  std::vector<std::string> targets;
  for (const forge::CpuTarget target : forge::usable_cpu_targets()) {
    targets.emplace_back(forge::cpu_target_name(target));
  }
  py::dict result;
  result["version"] = FORGE_VERSION;
#if defined(__clang__)
  result["compiler"] = "clang " __clang_version__;
#else
  result["compiler"] = "gcc " __VERSION__;
#endif
  result["build_type"] = FORGE_BUILD_TYPE;
  result["cpu_targets"] = targets;
  result["metal"] = FORGE_METAL_MODE;
  result["metallib"] = FORGE_METALLIB != 0;
  return result;
}

void set_num_threads(int threads) {
  if (threads < 1 || threads > forge::kMaxThreads) {
    throw std::invalid_argument("threads must be within [1, " + std::to_string(forge::kMaxThreads) +
                                "], got " + std::to_string(threads));
  }
  forge::set_num_threads(threads);
}

}  // namespace

PYBIND11_MODULE(_forge, module) {
  module.doc() = "Compiled attention kernels. The public interface is the package forge.";
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const forge::TypeError& error) {
      PyErr_SetString(PyExc_TypeError, error.what());
    } catch (const forge::TooLarge& error) {
      PyErr_SetString(PyExc_MemoryError, error.what());
    }
  });
  py::register_exception<forge::NotServed>(module, "NotServedError", PyExc_ValueError);
  forge::bindings::register_attention(module);
  forge::bindings::register_plain_calls(module);
  forge::bindings::register_dlpack(module);
  module.def("backends", &backends);
  module.def("build_config", &build_config);
  module.def("num_threads", &forge::num_threads);
  module.def("set_num_threads", &set_num_threads, py::arg("threads"));
}
