// What this process may use: cores and memory, by affinity, cgroup and machine.
#pragma once

#include <cstddef>

namespace syncengine {

// Cores this process may run on at once: affinity, limited by the cgroup's CPU quota (v2 and v1). At least 1.
int available_cores();

// Bytes that can still be taken without the OOM killer: MemAvailable, limited by the cgroup's memory limit.
size_t available_memory();

size_t total_memory();

}  // namespace syncengine
