#include "base/resources.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <string>

namespace syncengine {

namespace {

constexpr size_t kNoLimit = std::numeric_limits<size_t>::max();

// The first number in `path`, or kNoLimit where there is no such file or it says "max".
size_t read_number(const char* path) {
  std::ifstream file(path);
  size_t value = 0;
  return file >> value ? value : kNoLimit;
}

// The quota in cores; infinity where there is none.
double cpu_quota() {
  std::ifstream v2("/sys/fs/cgroup/cpu.max");
  double quota = 0, period = 0;
  if (v2 >> quota >> period && period > 0) return quota / period;
  size_t v1_quota = read_number("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
  size_t v1_period = read_number("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  bool limited = v1_quota != kNoLimit && v1_period != kNoLimit && v1_period > 0 && v1_quota < kNoLimit / 2;
  return limited ? static_cast<double>(v1_quota) / static_cast<double>(v1_period)
                 : std::numeric_limits<double>::infinity();
}

size_t left_below(const char* limit_path, const char* used_path) {
  size_t limit = read_number(limit_path);
  size_t used = read_number(used_path);
  if (limit == kNoLimit || used == kNoLimit) return kNoLimit;
  return limit > used ? limit - used : 0;
}

}  // namespace

int available_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  int cores =
      sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  double quota = cpu_quota();
  if (std::isfinite(quota)) cores = std::min(cores, static_cast<int>(quota));
  return std::max(cores, 1);
}

size_t available_memory() {
  size_t available = kNoLimit;
  std::ifstream file("/proc/meminfo");
  for (std::string key, rest; file >> key && std::getline(file, rest);) {
    if (key == "MemAvailable:") available = std::stoull(rest) * 1024;
  }
  available = std::min(available, left_below("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"));
  return std::min(available, left_below("/sys/fs/cgroup/memory/memory.limit_in_bytes",
                                        "/sys/fs/cgroup/memory/memory.usage_in_bytes"));
}

size_t total_memory() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace syncengine
