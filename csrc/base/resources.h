// The cores and the memory that this process may use, by affinity, cgroup and machine.
#pragma once

#include <cstddef>
#include <string>

namespace syncengine {

// Functions with a `root` look for /proc and for cgroups below that directory, which only tests set.

// Cores that this process may run on at once: its affinity, limited by the CPU quotas of its cgroup and of all cgroups
// above (v2 and v1). At least 1.
int available_cores(const std::string& root = "");

// Bytes that can still be allocated without waking the OOM killer: MemAvailable, limited by what the memory limits of
// this process's cgroup and of all cgroups above leave. Pages of files don't count as used: the kernel reclaims them.
size_t available_memory(const std::string& root = "");

size_t total_memory();

}  // namespace syncengine
