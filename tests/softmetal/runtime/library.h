// MTLLibrary, MTLFunction, MTLFunctionConstantValues, MTLComputePipelineState.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "runtime/device.h"

namespace softmetal {

std::vector<ClassObject*> library_classes();

// A value as the program gave it: its type, and its bytes.
struct ConstantValue {
  std::uint64_t type = 0;
  std::array<unsigned char, 16> bytes = {};
};

class ConstantValues : public Object {
 public:
  ConstantValues() : Object(class_of()) {}
  static ClassObject& class_of();
  static ConstantValues* make() { return new ConstantValues; }
  void set_at(const void* value, std::uint64_t type, std::uint64_t index);
  void set_named(const void* value, std::uint64_t type, String* name);
  const ConstantValue* find(const FunctionConstant& constant) const;

 private:
  std::map<std::uint64_t, ConstantValue> by_index_;
  std::map<std::string, ConstantValue> by_name_;
};

// The values of a pipeline, in the order of program.constants; those it does not read are unset.
struct ConstantSet {
  std::vector<ConstantValue> values;
  bool complete = false;  // every constant that the kernel reads has a value
};

class Library : public Object {
 public:
  // `made`: the kernels of templates that it has; nullptr: all.
  Library(Device* device, std::unique_ptr<std::set<std::string>> made)
      : Object(class_of()), device_(device), made_(std::move(made)) {}
  static ClassObject& class_of();
  class Function* function(String* name);
  class Function* specialized(String* name, ConstantValues* values, Error** error);
  Array* function_names();
  Device* device() const { return device_.get(); }

 private:
  const Kernel* find(const std::string& name) const;

  Ref<Device> device_;
  std::unique_ptr<std::set<std::string>> made_;
};

class Function : public Object {
 public:
  Function(Device* device, const Kernel* kernel, ConstantSet constants)
      : Object(class_of()), device_(device), kernel_(kernel), constants_(std::move(constants)) {}
  static ClassObject& class_of();
  String* name() const { return autoreleased(new String(kernel_->name)); }
  const Kernel* kernel() const { return kernel_; }
  const ConstantSet& constants() const { return constants_; }
  Device* device() const { return device_.get(); }

 private:
  Ref<Device> device_;
  const Kernel* kernel_;
  ConstantSet constants_;
};

class Pipeline : public Object {
 public:
  Pipeline(Device* device, const Kernel* kernel, ConstantSet constants, std::uint64_t max_threads);
  static ClassObject& class_of();
  const Kernel* kernel() const { return kernel_; }
  // Before the kernel runs on a thread: its function constants.
  void install_constants() const;
  // Whether a function constant of type bool is true.
  bool enabled(const char* constant) const;

  std::uint64_t max_threads() const { return max_threads_; }
  std::uint64_t execution_width() const { return kSimdWidth; }
  std::uint64_t static_memory() const { return 0; }
  Device* device() const { return device_.get(); }

 private:
  Ref<Device> device_;
  const Kernel* kernel_;
  ConstantSet constants_;
  std::uint64_t max_threads_;
};

}  // namespace softmetal
