// The shaders as one text, for newLibraryWithSource. Written into the build folder by
// cmake/flatten_shaders.py.
#pragma once

#include <cstddef>

namespace forge::metal {

extern const char kShaderSource[];  // with a terminating 0, which the size does not count
extern const std::size_t kShaderSourceSize;

// As MTL::LanguageVersion numbers it; the metallib is compiled as the same.
extern const unsigned kShaderLanguageVersion;

}  // namespace forge::metal
