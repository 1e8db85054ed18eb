// The cores and the memory that this process may use, by affinity, cgroup and machine.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace syncengine {

// Files are looked for below `root`, which only tests set.

// Cores that this process may run on at once: its affinity, limited by the CPU quotas of its cgroup and of all cgroups
// above (v2 and v1). At least 1.
int available_cores(const std::string& root = "");

// Bytes that can still be allocated without waking the OOM killer: MemAvailable, limited by what the memory limits of
// this process's cgroup and of all cgroups above leave. Pages of files don't count as used: the kernel reclaims them.
size_t available_memory(const std::string& root = "");

size_t total_memory();

// Folders in which the limits of this process's cgroups are to be read: its own cgroup and all above it, since each may
// have limits.
//
// Thread-safety: any thread. Failure: what can't be seen from here (a container's own view, no /proc) is left out.

struct CgroupFolders {
  std::vector<std::string> v2, v1;  // from the innermost upwards; each ends with a slash
};

// The folders of `controller` ("memory", "cpu"). Files are looked for below `root`, which only tests set.
CgroupFolders cgroup_folders(const std::string& controller, const std::string& root = "");

}  // namespace syncengine
