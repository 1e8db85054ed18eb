#include "base/resources.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <initializer_list>
#include <limits>
#include <string>
#include <string_view>

#include "base/cgroup.h"

namespace syncengine {

namespace {

constexpr size_t kNoLimit = std::numeric_limits<size_t>::max();

// The first number in `path`, or kNoLimit where there is no such file or it says "max".
size_t read_number(const std::string& path) {
  std::ifstream file(path);
  size_t value = 0;
  return file >> value ? value : kNoLimit;
}

// The numbers of lines "key number" in `path`, added.
size_t sum_of(const std::string& path, std::initializer_list<std::string_view> keys) {
  std::ifstream file(path);
  size_t sum = 0, value = 0;
  for (std::string key; file >> key >> value;) {
    if (std::find(keys.begin(), keys.end(), key) != keys.end()) sum += value;
  }
  return sum;
}

// The quota in cores; infinity where there is none.
double cpu_quota(const std::string& root) {
  double least = std::numeric_limits<double>::infinity();
  const CgroupFolders folders = cgroup_folders("cpu", root);
  for (const auto& folder : folders.v2) {
    std::ifstream file(folder + "cpu.max");
    double quota = 0, period = 0;
    if (file >> quota >> period && period > 0) least = std::min(least, quota / period);
  }
  for (const auto& folder : folders.v1) {
    const size_t quota = read_number(folder + "cpu.cfs_quota_us"), period = read_number(folder + "cpu.cfs_period_us");
    const bool limited = quota < kNoLimit / 2 && period != kNoLimit && period > 0;  // -1: unlimited
    if (limited) least = std::min(least, static_cast<double>(quota) / static_cast<double>(period));
  }
  return least;
}

// Pages of files count as used, and go when memory is wanted; those of shared memory, ours among them, do not.
size_t left_below(size_t limit, size_t used, size_t reclaimable) {
  if (limit == kNoLimit || used == kNoLimit) return kNoLimit;
  used -= std::min(used, reclaimable);
  return limit > used ? limit - used : 0;
}

}  // namespace

int available_cores(const std::string& root) {
  cpu_set_t set;
  CPU_ZERO(&set);
  int cores =
      sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  double quota = cpu_quota(root);
  if (std::isfinite(quota)) cores = std::min(cores, static_cast<int>(quota));
  return std::max(cores, 1);
}

size_t available_memory(const std::string& root) {
  size_t available = kNoLimit;
  std::ifstream file(root + "/proc/meminfo");
  for (std::string key, rest; file >> key && std::getline(file, rest);) {
    if (key == "MemAvailable:") available = std::stoull(rest) * 1024;
  }
  const CgroupFolders folders = cgroup_folders("memory", root);
  for (const auto& folder : folders.v2)
    available =
        std::min(available, left_below(read_number(folder + "memory.max"), read_number(folder + "memory.current"),
                                       sum_of(folder + "memory.stat", {"active_file", "inactive_file"})));
  for (const auto& folder : folders.v1)
    available =
        std::min(available, left_below(read_number(folder + "memory.limit_in_bytes"),
                                       read_number(folder + "memory.usage_in_bytes"),
                                       sum_of(folder + "memory.stat", {"total_active_file", "total_inactive_file"})));
  return available;
}

size_t total_memory() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace syncengine
