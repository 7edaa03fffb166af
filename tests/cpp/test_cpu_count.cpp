// The CPU quota is the least of the process's control group and of those above it, version 1 and 2.
#include <climits>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <string>
#include <utility>

#include "check.h"
#include "core/cpu_count.h"

namespace {

namespace fs = std::filesystem;
using Files = std::initializer_list<std::pair<const char*, const char*>>;

// What cgroup_cpus says where /proc/self/cgroup reads `groups` and the mount holds `files`.
int cpus(const char* groups, Files files) {
  const fs::path root = fs::temp_directory_path() / "forge_test_cpu_count";
  fs::remove_all(root);
  fs::create_directories(root / "mount");
  std::ofstream(root / "groups") << groups;
  for (const auto& [name, content] : files) {
    const fs::path file = root / "mount" / name;
    fs::create_directories(file.parent_path());
    std::ofstream(file) << content;
  }
  const int count = forge::cgroup_cpus((root / "groups").string(), (root / "mount").string());
  fs::remove_all(root);
  return count;
}

void test_version_2() {
  CHECK(cpus("0::/a/b\n", {{"a/b/cpu.max", "300000 100000\n"}}) == 3);
  CHECK(cpus("0::/a/b\n", {{"a/b/cpu.max", "max 100000\n"}, {"a/cpu.max", "150000 100000\n"}}) ==
        2);
  CHECK(cpus("0::/a/b\n", {{"a/b/cpu.max", "400000 100000\n"}, {"a/cpu.max", "500000 100000\n"}}) ==
        4);
  CHECK(cpus("0::/a/b\n", {{"a/b/cpu.max", "max 100000\n"}, {"a/c/cpu.max", "100000 100000\n"}}) ==
        INT_MAX);
  CHECK(cpus("0::/\n", {{"cpu.max", "50000 100000\n"}}) == 1);
  // A container that sees its host's path, and its own group as the root.
  CHECK(cpus("0::/host/path\n", {{"cpu.max", "200000 100000\n"}}) == 2);
}

void test_version_1() {
  const char* groups = "5:memory:/m\n4:cpu,cpuacct:/a/b\n3:cpuset:/s\n0::/\n";
  CHECK(cpus(groups, {{"cpu/a/b/cpu.cfs_quota_us", "-1\n"},
                      {"cpu/a/b/cpu.cfs_period_us", "100000\n"},
                      {"cpu/a/cpu.cfs_quota_us", "250000\n"},
                      {"cpu/a/cpu.cfs_period_us", "100000\n"},
                      {"cpu/s/cpu.cfs_quota_us", "100000\n"},
                      {"cpu/s/cpu.cfs_period_us", "100000\n"}}) == 3);
  CHECK(cpus("1:cpu:/\n",
             {{"cpu/cpu.cfs_quota_us", "20000\n"}, {"cpu/cpu.cfs_period_us", "10000\n"}}) == 2);
}

void test_no_limit() {
  CHECK(cpus("", {}) == INT_MAX);
  CHECK(cpus("0::/a\n", {{"a/cpu.max", "what\n"}}) == INT_MAX);
  CHECK(cpus("nothing\n:\n0::\n", {}) == INT_MAX);
  CHECK(forge::cgroup_cpus("/no/such/file", "/no/such/folder") == INT_MAX);
}

}  // namespace

int main() {
  test_version_2();
  test_version_1();
  test_no_limit();
  CHECK(forge::usable_cpus() >= 1);
  return test_result();
}
