#include "base/descriptors.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>

#include <mutex>
#include <set>

#include "base/error.h"

namespace syncengine {

namespace {

struct Registry {
  std::mutex mutex;
  std::set<int> descriptors;
};

Registry& registry = *new Registry;  // never destroyed: descriptors may outlive static destruction

// Replaces the descriptors of all ParentFds by /dev/null in a forked child. Makes async-signal-safe calls only, since
// locks that other threads of the parent held stay locked there.
void in_child() {
  int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
  for (int descriptor : registry.descriptors) {
    if (nothing < 0 || dup3(nothing, descriptor, O_CLOEXEC) < 0) close(descriptor);
  }
  if (nothing >= 0) close(nothing);
  registry.mutex.unlock();
}

}  // namespace

ParentFd::ParentFd(const std::function<int()>& open) {
  [[maybe_unused]] static int once =
      pthread_atfork([] { registry.mutex.lock(); }, [] { registry.mutex.unlock(); }, &in_child);
  std::lock_guard lock(registry.mutex);
  fd_ = UniqueFd(open());
  if (fd_) registry.descriptors.insert(fd_.get());
}

void ParentFd::reset() {
  if (!fd_) return;
  std::lock_guard lock(registry.mutex);  // until the descriptor is closed: its number may be another's afterwards
  registry.descriptors.erase(fd_.get());
  fd_.reset();
}

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
