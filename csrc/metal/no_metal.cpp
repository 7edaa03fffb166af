// Behind attention.h in builds without Metal.
#include <stdexcept>

#include "core/errors.h"
#include "metal/attention.h"

namespace forge::metal {

std::string unavailable_reason() { return "this build of forge has no Metal backend"; }

std::string fused_unavailable_reason(const Problem&) { return unavailable_reason(); }

Ran run(const Problem&) { throw std::runtime_error(unavailable_reason()); }

StreamPlan plan(const Problem&, bool) { throw NotServed(unavailable_reason()); }

const char* shader_text() { throw NotServed(unavailable_reason()); }

}  // namespace forge::metal
