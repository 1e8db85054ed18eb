#include "base/parent_fd.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <set>

namespace syncengine {

namespace {

struct Registry {
  std::mutex mutex;
  std::set<int> descriptors;
};

Registry& registry() {
  static auto* instance = new Registry;  // never destroyed: descriptors may outlive static destruction
  return *instance;
}

void before_fork() { registry().mutex.lock(); }
void in_parent() { registry().mutex.unlock(); }

// Makes async-signal-safe calls only: other threads' locks are lost in the child.
void in_child() {
  int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
  for (int descriptor : registry().descriptors) {
    if (nothing < 0 || dup3(nothing, descriptor, O_CLOEXEC) < 0) close(descriptor);
  }
  if (nothing >= 0) close(nothing);
  registry().mutex.unlock();
}

}  // namespace

ParentFd::ParentFd(const std::function<int()>& open) {
  [[maybe_unused]] static int once = pthread_atfork(&before_fork, &in_parent, &in_child);
  std::lock_guard lock(registry().mutex);
  fd_ = UniqueFd(open());
  if (fd_) registry().descriptors.insert(fd_.get());
}

void ParentFd::reset() {
  if (!fd_) return;
  std::lock_guard lock(registry().mutex);  // held until the descriptor is closed: afterwards its number may be
                                           // another's
  registry().descriptors.erase(fd_.get());
  fd_.reset();
}

}  // namespace syncengine
