#include "metal/shader_library.h"

#include <dlfcn.h>

#include <algorithm>
#include <filesystem>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <utility>

#include "metal/context.h"
#include "metal/shader_source.h"

namespace forge::metal {
namespace {

NS::String* string_of(const std::string& text) {
  return NS::String::string(text.c_str(), NS::UTF8StringEncoding);
}

// forge.metallib lies beside the module.
std::filesystem::path metallib_path() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&metallib_path), &info) == 0 || !info.dli_fname) {
    return {};
  }
  return std::filesystem::path(info.dli_fname).parent_path() / "forge.metallib";
}

// How a line of the text begins that makes a kernel of a template.
constexpr std::string_view kInstantiation = "template [[host_name(\"";

// The kernel that the line makes, or nothing.
std::string_view made_by(std::string_view line) {
  if (line.substr(0, kInstantiation.size()) != kInstantiation) return {};
  line.remove_prefix(kInstantiation.size());
  return line.substr(0, line.find('"'));
}

// What is compiled together: dq, dk and dv of one head dim; else a template kernel by itself.
std::string pass_of(std::string_view kernel) {
  std::string pass(kernel);
  for (const std::string_view part : {"_dq_", "_dkv_"}) {
    const std::size_t at = pass.find(part);
    if (at != std::string::npos) pass.replace(at, part.size(), "_");
  }
  return pass;
}

template <typename Visit>
void for_each_line(std::string_view text, Visit&& visit) {
  while (!text.empty()) {
    const std::string_view line = text.substr(0, text.find('\n'));
    visit(line);
    text.remove_prefix(std::min(text.size(), line.size() + 1));
  }
}

bool is_made_of_a_template(std::string_view kernel) {
  bool found = false;
  for_each_line(kShaderSource, [&](std::string_view line) { found |= made_by(line) == kernel; });
  return found;
}

// The text with this pass's template kernels alone. Lines keep their numbers.
std::string text_of_pass(const std::string& pass) {
  std::string text;
  for_each_line(kShaderSource, [&](std::string_view line) {
    const std::string_view kernel = made_by(line);
    if (kernel.empty() || pass_of(kernel) == pass) text += line;
    text += '\n';
  });
  return text;
}

}  // namespace

ShaderLibrary::ShaderLibrary(NS::SharedPtr<MTL::Device> device) : device_(std::move(device)) {
  const std::filesystem::path path = metallib_path();
  std::error_code ignored;
  if (path.empty() || !std::filesystem::exists(path, ignored)) {
    origin_ = "source: no metallib was built";
    return;
  }
  NS::Error* error = nullptr;
  metallib_ = NS::TransferPtr(
      device_->newLibrary(NS::URL::fileURLWithPath(string_of(path.string())), &error));
  origin_ = metallib_ ? "metallib"
                      : "source: the metallib does not load: " + text_of(error, "no reason given");
}

MTL::Library& ShaderLibrary::with(const std::string& kernel) {
  if (metallib_) return *metallib_.get();
  const bool is_template = is_made_of_a_template(kernel);
  // Each has the kernels that are no templates, whatever pass it was made for.
  if (!is_template && !of_passes_.empty()) return *of_passes_.begin()->second.get();
  const std::string pass = is_template ? pass_of(kernel) : "";
  const auto known = of_passes_.find(pass);
  if (known != of_passes_.end()) return *known->second.get();
  return *of_passes_.emplace(pass, compile(text_of_pass(pass))).first->second.get();
}

ShaderLibrary::LibraryPtr ShaderLibrary::compile(const std::string& text) const {
  const auto options = NS::TransferPtr(MTL::CompileOptions::alloc()->init());
  options->setLanguageVersion(static_cast<MTL::LanguageVersion>(kShaderLanguageVersion));
  // Fast math is the default, and breaks NaN, infinities and the shared exp. The second way to say
  // so is macOS 15's.
  options->setFastMathEnabled(false);
  if (NS::ProcessInfo::processInfo()->isOperatingSystemAtLeastVersion({15, 0, 0})) {
    options->setMathMode(MTL::MathModeSafe);
    options->setMathFloatingPointFunctions(MTL::MathFloatingPointFunctionsPrecise);
  }
  NS::Error* error = nullptr;
  auto library = NS::TransferPtr(device_->newLibrary(string_of(text), options.get(), &error));
  if (!library) {
    throw std::runtime_error("the shaders do not compile: " + text_of(error, "no reason given"));
  }
  return library;
}

}  // namespace forge::metal
