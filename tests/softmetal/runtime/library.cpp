#include "runtime/library.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

#include "runtime/control.h"
#include "runtime/errors.h"

namespace softmetal {

namespace {

constexpr char kMetallibMagic[] = "softmetal library 1\n";

// FNV-1a, 64 bits; tests/softmetal/msl.py computes the same.
std::uint64_t text_hash(const std::string& text) {
  std::uint64_t hash = 0xcbf29ce484222325u;
  for (unsigned char byte : text) hash = (hash ^ byte) * 0x100000001b3u;
  return hash;
}

std::string hexadecimal(std::uint64_t value) {
  char text[20];
  std::snprintf(text, sizeof text, "%016" PRIx64, value);
  return text;
}

const Kernel* find_kernel(const std::string& name) {
  for (int i = 0; i < program.kernel_count; ++i) {
    if (name == program.kernels[i].name) return &program.kernels[i];
  }
  return nullptr;
}

// A text that the device was built from, or a part of it: lines that make kernels of templates may
// be missing.
struct SourceText {
  std::string stem;  // with empty lines in the place of those lines
  std::unique_ptr<std::set<std::string>> made = std::make_unique<std::set<std::string>>();

  explicit SourceText(const std::string& text) {
    const std::string begin = "template [[host_name(\"";
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line); stem += '\n') {
      if (line.rfind(begin, 0) != 0) {
        stem += line;
      } else {
        made->insert(line.substr(begin.size(), line.find('"', begin.size()) - begin.size()));
      }
    }
    if (!stem.empty() && (text.empty() || text.back() != '\n')) stem.pop_back();
  }
};

bool reads(const Kernel& kernel, const FunctionConstant& constant) {
  for (int i = 0; i < kernel.constant_count; ++i) {
    if (std::strcmp(kernel.constants[i], constant.name) == 0) return true;
  }
  return false;
}

}  // namespace

ClassObject& ConstantValues::class_of() {
  static ClassObject& of =
      (new ClassObject("MTLFunctionConstantValues"))
          ->class_method<&ConstantValues::make>("alloc")
          .method<&ConstantValues::set_at>("setConstantValue:type:atIndex:")
          .method<&ConstantValues::set_named>("setConstantValue:type:withName:");
  return of;
}

namespace {

// Bytes of a value, by MTLDataType; 0: not one that a function constant of ours has.
std::size_t type_bytes(std::uint64_t type) {
  switch (type) {
    case 53:
      return 1;  // bool
    case 37:
    case 41:
      return 2;  // short, ushort
    case 3:
    case 29:
    case 33:
      return 4;  // float, int, uint
    case 81:
    case 85:
      return 8;  // long, ulong
    default:
      return 0;
  }
}

ConstantValue constant_value(const void* value, std::uint64_t type) {
  ConstantValue result;
  result.type = type;
  std::memcpy(result.bytes.data(), value, type_bytes(type));
  return result;
}

}  // namespace

void ConstantValues::set_at(const void* value, std::uint64_t type, std::uint64_t index) {
  by_index_[index] = constant_value(value, type);
}
void ConstantValues::set_named(const void* value, std::uint64_t type, String* name) {
  by_name_[name->text()] = constant_value(value, type);
}

const ConstantValue* ConstantValues::find(const FunctionConstant& constant) const {
  auto named = by_name_.find(constant.name);
  if (named != by_name_.end()) return &named->second;
  auto at = by_index_.find(std::uint64_t(constant.index));
  return at == by_index_.end() ? nullptr : &at->second;
}

ClassObject& Library::class_of() {
  static ClassObject& of =
      (new ClassObject("MTLLibrary"))
          ->method<&Library::function>("newFunctionWithName:")
          .method<&Library::specialized>("newFunctionWithName:constantValues:error:")
          .method<&Library::function_names>("functionNames")
          .method<&Library::device>("device");
  return of;
}

const Kernel* Library::find(const std::string& name) const {
  const Kernel* kernel = find_kernel(name);
  bool missing = kernel != nullptr && kernel->instantiated && made_ && made_->count(name) == 0;
  return missing ? nullptr : kernel;
}

Function* Library::function(String* name) {
  const Kernel* kernel = find(name->text());
  if (fault_strikes(Setting::kBadFunction) || kernel == nullptr) return nullptr;
  ConstantSet none;
  none.values.resize(std::size_t(program.constant_count));
  none.complete = kernel->constant_count == 0;
  return new Function(device(), kernel, std::move(none));
}

Function* Library::specialized(String* name, ConstantValues* values, Error** error) {
  const Kernel* kernel = find(name->text());
  if (fault_strikes(Setting::kBadFunction) || kernel == nullptr) {
    store_error(error, library_error_domain(), kLibraryFunctionNotFound,
                "Function " + name->text() + " was not found in the library");
    return nullptr;
  }
  ConstantSet set;
  set.values.resize(std::size_t(program.constant_count));
  set.complete = true;
  for (int i = 0; i < program.constant_count; ++i) {
    const FunctionConstant& constant = program.constants[i];
    if (!reads(*kernel, constant)) continue;
    const ConstantValue* value = values->find(constant);
    std::string wrong;
    if (value == nullptr)
      wrong = "is not set";
    else if (value->type != std::uint64_t(constant.type))
      wrong = "has a value of another type";
    if (!wrong.empty()) {
      store_error(error, library_error_domain(), kLibraryCompileFailure,
                  std::string("function constant '") + constant.name + "' (index " +
                      std::to_string(constant.index) + ") of " + kernel->name + " " + wrong);
      return nullptr;
    }
    set.values[std::size_t(i)] = *value;
  }
  return new Function(device(), kernel, std::move(set));
}

Array* Library::function_names() {
  std::vector<Ref<Object>> names;
  for (int i = 0; i < program.kernel_count; ++i) {
    if (find(program.kernels[i].name) == nullptr) continue;
    names.push_back(adopted<Object>(new String(program.kernels[i].name)));
  }
  return autoreleased(new Array(std::move(names)));
}

ClassObject& Function::class_of() {
  static ClassObject& of = (new ClassObject("MTLFunction"))
                               ->method<&Function::name>("name")
                               .method<&Function::device>("device");
  return of;
}

Pipeline::Pipeline(Device* device, const Kernel* kernel, ConstantSet constants,
                   std::uint64_t max_threads)
    : Object(class_of()),
      device_(device),
      kernel_(kernel),
      constants_(std::move(constants)),
      max_threads_(max_threads) {}

ClassObject& Pipeline::class_of() {
  static ClassObject& of = (new ClassObject("MTLComputePipelineState"))
                               ->method<&Pipeline::max_threads>("maxTotalThreadsPerThreadgroup")
                               .method<&Pipeline::execution_width>("threadExecutionWidth")
                               .method<&Pipeline::static_memory>("staticThreadgroupMemoryLength")
                               .method<&Pipeline::device>("device");
  return of;
}

void Pipeline::install_constants() const {
  for (int i = 0; i < program.constant_count; ++i) {
    program.constants[i].set(constants_.values[std::size_t(i)].bytes.data());
  }
}

bool Pipeline::enabled(const char* constant) const {
  for (int i = 0; i < program.constant_count; ++i) {
    if (std::strcmp(program.constants[i].name, constant) == 0) {
      return constants_.values[std::size_t(i)].bytes[0] != 0;
    }
  }
  return false;
}

Library* Device::new_library_source(String* source, CompileOptions* options, Error** error) {
  CompileRecord record;
  if (options != nullptr) {
    record.language_version = std::int64_t(options->language_version());
    record.fast_math = options->fast_math();
    record.math_mode = options->math_mode();
    record.math_functions = options->math_functions();
  }
  record_compile(record);
  SourceText text(source->text());
  bool known = text_hash(text.stem) == program.stem_hash;
  for (const std::string& name : *text.made) {
    const Kernel* kernel = find_kernel(name);
    known = known && kernel != nullptr && kernel->instantiated;
  }
  if (fault_strikes(Setting::kBadSource) || !known) {
    store_error(error, library_error_domain(), kLibraryCompileFailure,
                "program_source:1:1: error: this is not the text that the software device was "
                "built from (hash " +
                    hexadecimal(text_hash(text.stem)) + ", expected " +
                    hexadecimal(program.stem_hash) + ")");
    return nullptr;
  }
  count(Event::kSourceLibraries);
  count(Event::kSourceTemplates, std::int64_t(text.made->size()));
  return new Library(this, std::move(text.made));
}

Library* Device::load_metallib(const std::string& path, Error** error) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    store_error(error, library_error_domain(), kLibraryFileNotFound, "no library file at " + path);
    return nullptr;
  }
  std::stringstream content;
  content << file.rdbuf();
  std::string expected = kMetallibMagic + hexadecimal(program.text_hash) + "\n";
  if (fault_strikes(Setting::kBadMetallib) || content.str() != expected) {
    store_error(error, library_error_domain(), kLibraryInternal,
                "the file at " + path + " is not a library that this device can load");
    return nullptr;
  }
  count(Event::kMetallibs);
  return new Library(this, nullptr);
}

Library* Device::new_library_url(Url* url, Error** error) {
  return load_metallib(url->path(), error);
}
Library* Device::new_library_file(String* path, Error** error) {
  return load_metallib(path->text(), error);
}

Pipeline* Device::new_pipeline(Function* function, Error** error) {
  std::string wrong;
  if (fault_strikes(Setting::kBadPipeline))
    wrong = "Compiler encountered an internal error";
  else if (lost())
    wrong = "the device was lost";
  else if (function->device() != this)
    wrong = "the function belongs to another device";
  else if (!function->constants().complete) {
    wrong = std::string("function ") + function->kernel()->name +
            " reads function constants and was made without values";
  }
  if (!wrong.empty()) {
    store_error(error, compute_pipeline_error_domain(), 2, wrong);
    return nullptr;
  }
  auto most = std::uint64_t(std::min<std::int64_t>(setting(Setting::kMaxThreads), kMaxThreads));
  int declared = function->kernel()->max_threads;
  if (declared > 0) most = std::min(most, std::uint64_t(declared));
  count(Event::kPipelines);
  return new Pipeline(this, function->kernel(), function->constants(), most);
}

std::vector<ClassObject*> library_classes() {
  return {&ConstantValues::class_of(), &Library::class_of(), &Function::class_of(),
          &Pipeline::class_of()};
}

}  // namespace softmetal
