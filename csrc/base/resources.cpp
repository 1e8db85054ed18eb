#include "base/resources.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <sstream>
#include <vector>

namespace syncengine {

namespace {

bool lists(const std::string& options, const std::string& option) {
  return ("," + options + ",").find("," + option + ",") != std::string::npos;
}

// This process's path in the cgroup hierarchy of `controller`; an empty controller means the hierarchy of version 2.
std::string own_path(const std::string& controller, const std::string& root) {
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {  // "4:cpu,cpuacct:/job/7", "0::/job/7"
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (controller.empty() ? controllers.empty() : lists(controllers, controller)) return line.substr(second + 1);
  }
  return "/";
}

struct Mount {
  std::string top;    // the cgroup that is mounted there
  std::string place;  // empty: nowhere
};

Mount find_mount(const std::string& controller, const std::string& root) {
  std::ifstream file(root + "/proc/self/mountinfo");
  for (std::string line; std::getline(file, line);) {  // "35 31 0:32 /top /place rw - cgroup cgroup rw,memory"
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream before(line.substr(0, dash)), after(line.substr(dash + 3));
    std::string id, parent, device, top, place, type, source, options;
    before >> id >> parent >> device >> top >> place;
    after >> type >> source >> options;
    const bool fits = controller.empty() ? type == "cgroup2" : type == "cgroup" && lists(options, controller);
    if (fits && !place.empty()) return {top, place};
  }
  return {};
}

// The folders of this process's cgroup and of all above it, since each may have limits: from the innermost upwards;
// each ends with a slash. Cgroups that can't be seen from here (a container's own view, no /proc) are left out.
std::vector<std::string> folders(const std::string& controller, const std::string& root) {
  const Mount mount = find_mount(controller, root);
  if (mount.place.empty()) return {};
  std::string path = own_path(controller, root);
  // A container may see its own cgroup as the root of the mount, while /proc gives the path on the host: the mount's
  // part is cut off. A path that leads out of what the container sees counts as the root.
  if (mount.top != "/" && (path + "/").starts_with(mount.top + "/")) path.erase(0, mount.top.size());
  if ((path + "/").find("/../") != std::string::npos) path.clear();
  std::vector<std::string> all;
  for (; path.find_first_not_of('/') != std::string::npos; path.erase(path.rfind('/')))
    all.push_back(root + mount.place + path + "/");
  all.push_back(root + mount.place + "/");
  return all;
}

constexpr size_t kNoLimit = std::numeric_limits<size_t>::max();

// The first number in `path`, or kNoLimit if there is no such file or the file says "max".
size_t read_number(const std::string& path) {
  std::ifstream file(path);
  size_t value = 0;
  return file >> value ? value : kNoLimit;
}

// The smallest quota of this process's cgroups, in cores; infinity if there is none.
double cpu_quota(const std::string& root) {
  double least = std::numeric_limits<double>::infinity();
  for (const auto& folder : folders("", root)) {
    std::ifstream file(folder + "cpu.max");
    double quota = 0, period = 0;
    if (file >> quota >> period && period > 0) least = std::min(least, quota / period);
  }
  for (const auto& folder : folders("cpu", root)) {
    const size_t quota = read_number(folder + "cpu.cfs_quota_us"), period = read_number(folder + "cpu.cfs_period_us");
    const bool limited = quota < kNoLimit / 2 && period != kNoLimit && period > 0;  // -1: unlimited
    if (limited) least = std::min(least, static_cast<double>(quota) / static_cast<double>(period));
  }
  return least;
}

// Bytes left below a cgroup's limit. Cached pages of files (in memory.stat, active_file and inactive_file behind
// `prefix`) count as free, since Linux drops them on demand; pages of shared memory, such as the arenas', do not.
size_t left_below(const std::string& folder, const char* limit_name, const char* used_name, const std::string& prefix) {
  const size_t limit = read_number(folder + limit_name);
  size_t used = read_number(folder + used_name), bytes = 0;
  if (limit == kNoLimit || used == kNoLimit) return kNoLimit;
  std::ifstream file(folder + "memory.stat");
  for (std::string key; file >> key >> bytes;) {
    if (key == prefix + "active_file" || key == prefix + "inactive_file") used -= std::min(used, bytes);
  }
  return limit > used ? limit - used : 0;
}

}  // namespace

int available_cores(const std::string& root) {
  cpu_set_t set;
  CPU_ZERO(&set);
  const int cores =
      sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN));
  return std::max(static_cast<int>(std::min<double>(cores, cpu_quota(root))), 1);
}

size_t available_memory(const std::string& root) {
  size_t available = kNoLimit;
  std::ifstream file(root + "/proc/meminfo");
  for (std::string key, rest; file >> key && std::getline(file, rest);) {
    if (key == "MemAvailable:") available = std::stoull(rest) * 1024;
  }
  for (const auto& folder : folders("", root))
    available = std::min(available, left_below(folder, "memory.max", "memory.current", ""));
  for (const auto& folder : folders("memory", root))
    available = std::min(available, left_below(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"));
  return available;
}

size_t total_memory() {
  return static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace syncengine
