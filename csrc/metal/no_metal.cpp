// Behind attention.h in builds without Metal.
#include <stdexcept>

#include "metal/attention.h"

namespace forge::metal {
namespace {

[[noreturn]] void refuse() { throw std::runtime_error(unavailable_reason()); }

}  // namespace

std::string unavailable_reason() { return "this build of forge has no Metal backend"; }

std::string fused_unavailable_reason(const Problem&) { return unavailable_reason(); }

Ran attention_fwd(const Problem&, const ForwardArrays<float>&, const OwnedMemory&) { refuse(); }
Ran attention_bwd(const Problem&, const BackwardArrays<float>&, bool, const OwnedMemory&) {
  refuse();
}
Ran run_kernel(BackwardKernel, const Problem&, const BackwardArrays<float>&, const OwnedMemory&) {
  refuse();
}

}  // namespace forge::metal
