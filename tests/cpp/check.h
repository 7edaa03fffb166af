// Checks for test programs: a failed one is printed and counted, and main returns test_result().
#pragma once

#include <cstdio>

inline int& failed_checks() {
  static int count = 0;
  return count;
}

inline void report_failure(const char* file, int line, const char* what) {
  if (++failed_checks() <= 50) std::fprintf(stderr, "%s:%d: failed: %s\n", file, line, what);
}

#define CHECK(condition)                                              \
  do {                                                                \
    if (!(condition)) report_failure(__FILE__, __LINE__, #condition); \
  } while (0)

// With a printf message that says which case it was.
#define CHECK_MSG(condition, ...)                            \
  do {                                                       \
    if (!(condition)) {                                      \
      char message_[512];                                    \
      std::snprintf(message_, sizeof message_, __VA_ARGS__); \
      report_failure(__FILE__, __LINE__, message_);          \
    }                                                        \
  } while (0)

inline int test_result() {
  if (failed_checks() > 0) std::fprintf(stderr, "%d checks failed\n", failed_checks());
  return failed_checks() == 0 ? 0 : 1;
}
