#include "core/cpu_count.h"

#include <algorithm>
#include <climits>
#include <fstream>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#include <unistd.h>
#endif

namespace forge {
namespace {

int cpus_of(long long quota, long long period) {
  if (quota <= 0 || period <= 0) return INT_MAX;
  return static_cast<int>(std::min<long long>((quota - 1) / period + 1, INT_MAX));
}

// Version 2 has "quota period" in one file, "max" for none.
int limit_of_v2(const std::string& folder) {
  std::ifstream file(folder + "/cpu.max");
  long long quota, period;
  return file >> quota >> period ? cpus_of(quota, period) : INT_MAX;
}

// Version 1 has a file each, -1 for none.
int limit_of_v1(const std::string& folder) {
  std::ifstream quota_file(folder + "/cpu.cfs_quota_us"),
      period_file(folder + "/cpu.cfs_period_us");
  long long quota, period;
  return quota_file >> quota && period_file >> period ? cpus_of(quota, period) : INT_MAX;
}

}  // namespace

std::vector<int> allowed_cpus() {
  std::vector<int> cpus;
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(getpid(), sizeof set, &set) == 0) {  // of the main thread
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
      if (CPU_ISSET(cpu, &set)) cpus.push_back(cpu);
    }
  }
#endif
  if (cpus.empty()) {
    const int count = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    for (int cpu = 0; cpu < count; ++cpu) cpus.push_back(cpu);
  }
  return cpus;
}

// A line is "number:controllers:path", without controllers for version 2. A container may see paths
// of its host's, of which only the root is there to read: what is not there sets no limit.
int cgroup_cpus(const std::string& groups, const std::string& mount) {
  int least = INT_MAX;
  std::ifstream file(groups);
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool v2 = controllers == ",,";
    if (!v2 && controllers.find(",cpu,") == std::string::npos) continue;
    const std::string root = v2 ? mount : mount + "/cpu";
    std::string path = line.substr(second + 1);
    for (;;) {
      least = std::min(least, v2 ? limit_of_v2(root + path) : limit_of_v1(root + path));
      const std::size_t parent = path.rfind('/');
      if (parent == std::string::npos) break;
      path.resize(parent);
    }
  }
  return least;
}

int usable_cpus() {
  static const int cpus = std::min(static_cast<int>(allowed_cpus().size()),
                                   cgroup_cpus("/proc/self/cgroup", "/sys/fs/cgroup"));
  return cpus;
}

}  // namespace forge
