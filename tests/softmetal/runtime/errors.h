// Error domains and codes, numbered as Metal numbers them.
#pragma once

#include <cstdint>

namespace softmetal {

class String;

String* command_buffer_error_domain();
String* library_error_domain();
String* compute_pipeline_error_domain();

enum CommandBufferError : std::int64_t {
  kErrorInternal = 1,
  kErrorTimeout = 2,
  kErrorPageFault = 3,
  kErrorAccessRevoked = 4,
  kErrorOutOfMemory = 8,
  kErrorInvalidResource = 9,
  kErrorDeviceRemoved = 11,
};

enum LibraryError : std::int64_t {
  kLibraryInternal = 2,
  kLibraryCompileFailure = 3,
  kLibraryFunctionNotFound = 5,
  kLibraryFileNotFound = 6,
};

}  // namespace softmetal
