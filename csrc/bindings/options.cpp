#include "bindings/options.h"

#include <stdexcept>

#include "bindings/arrays.h"
#include "core/errors.h"

namespace py = pybind11;

namespace forge::bindings {
namespace {

py::object field(const py::dict& given, const char* name) {
  PyObject* value = PyDict_GetItemString(given.ptr(), name);
  if (value == nullptr) throw TypeError("options must have " + std::string(name));
  return py::reinterpret_borrow<py::object>(value);
}

[[noreturn]] void wrong_type(const char* name, const char* expected, const py::object& got) {
  throw TypeError(std::string(name) + " must be " + expected + ", got " +
                  std::string(py::str(py::type::of(got).attr("__name__"))));
}

std::int64_t int_of(const py::object& value, const char* name) {
  if (!PyLong_Check(value.ptr()) || PyBool_Check(value.ptr())) wrong_type(name, "an int", value);
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  if (overflow != 0) {
    throw std::invalid_argument(std::string(name) + " must be within int64, got " +
                                std::string(py::str(value)));
  }
  return number;
}

bool bool_field(const py::dict& given, const char* name) {
  const py::object value = field(given, name);
  if (!PyBool_Check(value.ptr())) wrong_type(name, "a bool", value);
  return value.ptr() == Py_True;
}

void window_field(const py::dict& given, Options& options) {
  const py::object value = field(given, "window");
  if (!PyTuple_Check(value.ptr())) wrong_type("window", "a tuple", value);
  const py::tuple window = py::reinterpret_borrow<py::tuple>(value);
  if (window.size() != 2) throw std::invalid_argument("window must be (left, right)");
  options.window_left = int_of(window[0], "window");
  options.window_right = int_of(window[1], "window");
}

double real_field(const py::dict& given, const char* name) {
  const py::object value = field(given, name);
  if (!PyFloat_Check(value.ptr())) wrong_type(name, "a float", value);
  return PyFloat_AS_DOUBLE(value.ptr());
}

std::string text_field(const py::dict& given, const char* name) {
  const py::object value = field(given, name);
  if (!PyUnicode_Check(value.ptr())) wrong_type(name, "a string", value);
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(value.ptr(), &size);
  if (text == nullptr) {
    PyErr_Clear();
    throw std::invalid_argument(std::string(name) + " must be valid text, got a lone surrogate");
  }
  return std::string(text, static_cast<std::size_t>(size));
}

}  // namespace

Options options_of(const py::dict& given) {
  Options options;
  options.causal = bool_field(given, "causal");
  window_field(given, options);
  options.scale = real_field(given, "scale");
  options.softcap = real_field(given, "softcap");
  options.ranges = field(given, "ranges");
  options.kernel = text_field(given, "kernel");
  options.backend = text_field(given, "backend");
  options.cpu_target = text_field(given, "cpu_target");
  return options;
}

Family family_of(const Options& options) {
  if (options.kernel == "fused") return Family::kFused;
  if (options.kernel == "materialized") return Family::kMaterialized;
  throw std::invalid_argument("kernel must be 'fused' or 'materialized', got '" + options.kernel +
                              "'");
}

void set_options(const Options& options, Problem& problem) {
  static_cast<MaskAndScale&>(problem) = options;
  if (options.ranges.is_none()) {
    problem.ranges.assign(static_cast<std::size_t>(problem.B),
                          {problem.Tk - problem.Tq, 0, problem.Tk});
  } else {
    problem.ranges = ranges_of(options.ranges);
    problem.runs = py::reinterpret_borrow<py::array>(options.ranges).ndim() == 3;
  }
}

}  // namespace forge::bindings
