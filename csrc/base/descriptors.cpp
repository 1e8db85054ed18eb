#include "base/descriptors.h"

#include <dirent.h>
#include <sys/resource.h>

#include "base/error.h"

namespace syncengine {

size_t open_descriptors() {
  DIR* folder = opendir("/proc/self/fd");
  if (folder == nullptr) return 0;
  size_t count = 0;
  while (const dirent* entry = readdir(folder)) count += entry->d_name[0] != '.';
  closedir(folder);
  return count - 1;  // without the descriptor of the folder itself
}

size_t most_descriptors() {
  rlimit limits{};
  return getrlimit(RLIMIT_NOFILE, &limits) == 0 ? limits.rlim_cur : RLIM_INFINITY;
}

void require_descriptors(const std::string& who, size_t count) {
  const size_t open = open_descriptors();
  if (open + count <= most_descriptors()) return;
  throw Error(ErrorKind::InvalidUsage, who + " needs " + std::to_string(count) + " file descriptors besides the " +
                                           std::to_string(open) + " that are open, and ulimit -n is " +
                                           std::to_string(most_descriptors()) + ": raise ulimit -n to at least " +
                                           std::to_string(open + count));
}

}  // namespace syncengine
