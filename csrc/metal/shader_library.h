// The compiled shaders: forge.metallib where there is one that loads, else as much of the text as a
// call needs, when it is first needed.
#pragma once

#include <Metal/Metal.hpp>
#include <map>
#include <string>

namespace forge::metal {

class ShaderLibrary {
 public:
  // Compiles nothing.
  explicit ShaderLibrary(NS::SharedPtr<MTL::Device> device);

  // "metallib", or "source" with the reason why.
  const std::string& origin() const { return origin_; }
  // A library with that kernel. Not thread-safe. Throws std::runtime_error with Metal's text where
  // the shaders do not compile.
  MTL::Library& with(const std::string& kernel);

 private:
  using LibraryPtr = NS::SharedPtr<MTL::Library>;

  LibraryPtr compile(const std::string& text) const;

  NS::SharedPtr<MTL::Device> device_;
  std::string origin_;
  LibraryPtr metallib_;                          // null: the text it is
  std::map<std::string, LibraryPtr> of_passes_;  // of the text, each with one pass of one head dim
};

}  // namespace forge::metal
