// How many CPUs there are for this process.
#pragma once

#include <string>
#include <vector>

namespace forge {

// The CPUs in the process's affinity mask.
std::vector<int> allowed_cpus();

// CPUs' worth of time that the process's control group and those above it grant, rounded up: the
// least of all. INT_MAX where none sets a limit. `groups` is the file /proc/self/cgroup, `mount`
// the folder that the hierarchies are mounted in.
int cgroup_cpus(const std::string& groups, const std::string& mount);

// Of the allowed CPUs, as many as the control groups grant; 1 at least.
int usable_cpus();

}  // namespace forge
