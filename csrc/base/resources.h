// What this process may use: cores and memory, by affinity, cgroup and machine.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace syncengine {

// Files are looked for below `root`, which tests give.

// Cores this process may run on at once: affinity, limited by the CPU quotas of its cgroup and all above it (v2 and
// v1). At least 1.
int available_cores(const std::string& root = "");

// Bytes that can still be taken without the OOM killer: MemAvailable, limited by what the memory limits of its cgroup
// and all above it leave. Pages of files don't count as used: the kernel reclaims them.
size_t available_memory(const std::string& root = "");

size_t total_memory();

// Where the limits of this process's cgroups are to be read: of its own and of all above it, each of which may have
// limits.
//
// Thread-safety: any thread. Failure: what can't be seen from here (a container's own view, no /proc) is left out.

struct CgroupFolders {
  std::vector<std::string> v2, v1;  // from the innermost upwards; each ends with a slash
};

// Of `controller` ("memory", "cpu"). Files are looked for below `root`, which tests give.
CgroupFolders cgroup_folders(const std::string& controller, const std::string& root = "");

}  // namespace syncengine
