#include "dispatch/metal_backend.h"

#include <stdexcept>

namespace forge {
namespace {

// A build without Metal: named, so that backends() can say why it does not serve.
class NoMetalBackend final : public Backend {
 public:
  const char* name() const override { return "metal"; }
  Support available() const override { return {false, "this build of forge has no Metal backend"}; }
  Support supports(const Problem&) const override { return available(); }
  RunInfo forward(const Problem&, const ForwardBuffers&, const std::string&) const override {
    refuse();
  }
  RunInfo backward(const Problem&, const BackwardBuffers&, bool,
                   const std::string&) const override {
    refuse();
  }
  RunInfo run_kernel(BackwardKernel, const Problem&, const BackwardArrays<float>&,
                     const std::string&) const override {
    refuse();
  }

 private:
  [[noreturn]] void refuse() const { throw std::invalid_argument("metal: " + available().reason); }
};

}  // namespace

const Backend& metal_backend() {
  static const NoMetalBackend backend;
  return backend;
}

}  // namespace forge
