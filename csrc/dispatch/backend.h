// Backends in order of preference, what each can serve, and the choice among them.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/problem.h"

namespace forge {

struct Support {
  bool ok;
  std::string reason;  // why not; empty when ok
};

// What ran, for last_run().
struct RunInfo {
  std::string backend;
  std::string kernel;
  std::string cpu_target;  // of the CPU
  int threads = 1;         // likewise
  std::string device;      // of a GPU
  std::string library;     // of a GPU: where its kernels came from
  // Of a GPU: what became of each array, "wrapped" or "copied: <reason>".
  std::vector<std::pair<std::string, std::string>> arrays;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual const char* name() const = 0;
  // Whether the backend works on this machine at all.
  virtual Support available() const = 0;
  // Whether it can serve this problem with the family that the problem names.
  virtual Support supports(const Problem& problem) const = 0;
  // Computes what problem.pass says. cpu_target: a name from core/cpu_target.h, or empty for the
  // best.
  virtual RunInfo run(const Problem& problem, const std::string& cpu_target) const = 0;
};

// In order of preference.
const std::vector<const Backend*>& backends();

struct BackendChoice {
  const Backend* backend;
  std::vector<std::pair<std::string, std::string>> passed_over;  // name, reason
};

// The backend of that name, or the first that supports the problem where the name is empty. Throws
// std::invalid_argument for an unknown name, and with the reason where it cannot serve.
BackendChoice choose_backend(const Problem& problem, const std::string& name);

}  // namespace forge
