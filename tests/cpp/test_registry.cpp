// Which backend is chosen, and what is said where none can serve; which CPU targets there are.
#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>

#include "check.h"
#include "core/cpu_target.h"
#include "dispatch/backend.h"

namespace {

forge::Problem problem_of(forge::Family family, forge::DType dtype, int hd) {
  forge::Problem problem;
  problem.family = family;
  problem.dtype = dtype;
  problem.B = 1;
  problem.H = 1;
  problem.Hkv = 1;
  problem.hd = problem.hv = hd;
  return problem;
}

std::string refusal(const forge::Problem& problem, const std::string& name) {
  try {
    forge::choose_backend(problem, name);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

void test_choice() {
  using forge::DType;
  using forge::Family;
  const forge::Problem plain = problem_of(Family::kMaterialized, DType::kFloat32, 8);
  CHECK(forge::choose_backend(plain, "cpu").backend->name() == std::string("cpu"));
  // Unnamed: the first that serves, with the reasons of those before it.
  const forge::BackendChoice choice = forge::choose_backend(plain, "");
  for (const auto& [name, reason] : choice.passed_over) {
    CHECK(name != choice.backend->name());
    CHECK(!reason.empty());
  }
  CHECK(contains(refusal(plain, "cuda"), "'metal', 'cpu', got 'cuda'"));
  // A named backend that cannot serve is an error with its reason, never another backend.
  CHECK(contains(refusal(problem_of(Family::kFused, DType::kFloat64, 8), "cpu"), "materialized"));
  CHECK(contains(refusal(problem_of(Family::kFused, DType::kFloat32, 513), "cpu"), "513"));
  CHECK(refusal(problem_of(Family::kFused, DType::kFloat32, 512), "cpu").empty());
  CHECK(refusal(problem_of(Family::kMaterialized, DType::kFloat64, 600), "cpu").empty());
}

void test_backends_say_why_not() {
  for (const forge::Backend* backend : forge::backends()) {
    const forge::Support support = backend->available();
    CHECK(support.ok == support.reason.empty());
  }
}

void test_cpu_targets() {
  const auto& targets = forge::usable_cpu_targets();
  CHECK(!targets.empty());
  CHECK(forge::choose_cpu_target("") == targets.front());
  for (const forge::CpuTarget target : targets) {
    CHECK(forge::choose_cpu_target(forge::cpu_target_name(target)) == target);
  }
  bool refused = false;
  try {
    forge::choose_cpu_target("sse9");
  } catch (const std::invalid_argument& error) {
    refused = contains(error.what(), "'sse9'");
  }
  CHECK(refused);
}

#if defined(__x86_64__) && defined(__linux__)
// The kernel lists a flag only where the processor has the feature and the system saves its state.
std::set<std::string> flags_of_linux() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (line.compare(0, 5, "flags") != 0) continue;
    std::istringstream words(line.substr(line.find(':') + 1));
    std::set<std::string> flags;
    for (std::string word; words >> word;) flags.insert(word);
    return flags;
  }
  return {};
}

// Every compiler's build must find what is there: a target not found is a slow build, unnoticed.
void test_cpu_targets_are_those_that_linux_lists() {
  const std::set<std::string> flags = flags_of_linux();
  CHECK(!flags.empty());
  const auto has = [&flags](std::initializer_list<const char*> names) {
    return std::all_of(names.begin(), names.end(),
                       [&flags](const char* name) { return flags.count(name) != 0; });
  };
  const auto& targets = forge::usable_cpu_targets();
  const auto usable = [&targets](forge::CpuTarget target) {
    return std::find(targets.begin(), targets.end(), target) != targets.end();
  };
  CHECK(usable(forge::CpuTarget::kAvx2) == has({"avx2", "fma"}));
  CHECK(usable(forge::CpuTarget::kAvx512) ==
        has({"avx512f", "avx512vl", "avx512dq", "avx512bw", "avx2", "fma"}));
}
#endif

}  // namespace

int main() {
  test_choice();
  test_backends_say_why_not();
  test_cpu_targets();
#if defined(__x86_64__) && defined(__linux__)
  test_cpu_targets_are_those_that_linux_lists();
#endif
  return test_result();
}
