#include "transport/tcp/parent_fd.h"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <set>

namespace syncengine::tcp {

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

// Only async-signal-safe calls here: other threads' locks are lost in the child.
void in_child() {
  int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
  for (int descriptor : registry().descriptors) {
    if (nothing < 0 || dup3(nothing, descriptor, O_CLOEXEC) < 0) close(descriptor);
  }
  if (nothing >= 0) close(nothing);
  registry().mutex.unlock();
}

}  // namespace

ParentFd::ParentFd(UniqueFd fd) : fd_(std::move(fd)) {
  [[maybe_unused]] static int once = pthread_atfork(&before_fork, &in_parent, &in_child);
  if (!fd_) return;
  std::lock_guard lock(registry().mutex);
  registry().descriptors.insert(fd_.get());
}

void ParentFd::reset() {
  if (!fd_) return;
  std::lock_guard lock(registry().mutex);  // until it is closed: the number is another's from then on
  registry().descriptors.erase(fd_.get());
  fd_.reset();
}

}  // namespace syncengine::tcp
