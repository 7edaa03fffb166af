// The shaders as one text, for newLibraryWithSource. Written into the build folder by
// cmake/flatten_shaders.py.
#pragma once

namespace forge::metal {

extern const char kShaderSource[];

// As MTL::LanguageVersion numbers it; the metallib is compiled as the same.
extern const unsigned kShaderLanguageVersion;

}  // namespace forge::metal
