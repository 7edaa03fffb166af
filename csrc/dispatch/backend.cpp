#include "dispatch/backend.h"

#include <stdexcept>

#include "core/errors.h"
#include "dispatch/cpu_backend.h"
#include "dispatch/metal_backend.h"

namespace forge {

const std::vector<const Backend*>& backends() {
  static const std::vector<const Backend*> ordered = {&metal_backend(), &cpu_backend()};
  return ordered;
}

BackendChoice choose_backend(const Problem& problem, const std::string& name) {
  BackendChoice choice{nullptr, {}};
  std::string names;
  for (const Backend* backend : backends()) {
    names += (names.empty() ? "'" : ", '") + std::string(backend->name()) + "'";
    if (!name.empty() && name != backend->name()) continue;
    Support support = backend->available();
    if (support.ok) support = backend->supports(problem);
    if (support.ok) {
      choice.backend = backend;
      return choice;
    }
    choice.passed_over.emplace_back(backend->name(), support.reason);
  }
  if (choice.passed_over.empty()) {
    throw std::invalid_argument("backend must be one of " + names + ", got '" + name + "'");
  }
  const std::string kernel = family_name(problem.family);
  if (!name.empty()) {
    throw NotServed("backend must be one that can serve this call with kernel='" + kernel +
                    "', got '" + name + "': " + choice.passed_over.front().second);
  }
  std::string reasons;
  for (const auto& [backend, reason] : choice.passed_over) {
    reasons += (reasons.empty() ? "" : "; ") + backend + ": " + reason;
  }
  throw NotServed("kernel must be one that a backend can serve, got '" + kernel + "': " + reasons);
}

}  // namespace forge
