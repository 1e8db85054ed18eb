// Where the limits of this process's cgroups are to be read: of its own and of all above it, each of which may have
// limits.
//
// Thread-safety: any thread. Failure: what can't be seen from here (a container's own view, no /proc) is left out.
#pragma once

#include <string>
#include <vector>

namespace syncengine {

struct CgroupFolders {
  std::vector<std::string> v2, v1;  // from the innermost upwards; each ends with a slash
};

// Of `controller` ("memory", "cpu"). Files are looked for below `root`, which tests give.
CgroupFolders cgroup_folders(const std::string& controller, const std::string& root = "");

}  // namespace syncengine
