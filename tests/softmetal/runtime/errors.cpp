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
