#include "runtime/errors.h"

#include "runtime/foundation.h"

namespace softmetal {

namespace {

// Constants live for ever and are not counted as live objects.
class ConstantString : public String {
 public:
  explicit ConstantString(const char* text) : String(text) { --class_of().live; }
};

}  // namespace

String* command_buffer_error_domain() {
  static String* domain = new ConstantString("MTLCommandBufferErrorDomain");
  return domain;
}
String* library_error_domain() {
  static String* domain = new ConstantString("MTLLibraryErrorDomain");
  return domain;
}
String* compute_pipeline_error_domain() {
  static String* domain = new ConstantString("AGXMetal");
  return domain;
}

}  // namespace softmetal

// metal-cpp reads these by name when the program starts, so they are set before other initializers
// run.
extern "C" {
__attribute__((visibility("default"))) softmetal::String* MTLCommandBufferErrorDomain = nullptr;
__attribute__((visibility("default"))) softmetal::String* MTLLibraryErrorDomain = nullptr;
}

namespace {

__attribute__((constructor(101))) void set_constants() {
  MTLCommandBufferErrorDomain = softmetal::command_buffer_error_domain();
  MTLLibraryErrorDomain = softmetal::library_error_domain();
}

}  // namespace
