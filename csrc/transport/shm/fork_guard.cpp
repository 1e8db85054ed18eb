#include "transport/shm/fork_guard.h"

#include <pthread.h>

#include <mutex>
#include <new>
#include <set>

#include "base/resources.h"
#include "transport/shm/arena.h"
#include "transport/shm/region.h"

namespace syncengine::shm {

namespace {

struct Registry {
  std::mutex mutex;
  std::set<Arena*> arenas;
  std::set<PeerArena*> peers;
  std::set<Region*> regions;
};

Registry& registry() {
  static auto* instance = new Registry;  // never destroyed: arenas may outlive static destruction
  return *instance;
}

}  // namespace

void ForkGuard::install() { [[maybe_unused]] static int once = pthread_atfork(&before, &in_parent, &in_child); }

void ForkGuard::add(Arena* arena) {
  install();
  std::lock_guard lock(registry().mutex);
  registry().arenas.insert(arena);
}

void ForkGuard::add(PeerArena* arena) {
  install();
  std::lock_guard lock(registry().mutex);
  registry().peers.insert(arena);
}

void ForkGuard::add(Region* region) {
  install();
  std::lock_guard lock(registry().mutex);
  registry().regions.insert(region);
}

void ForkGuard::remove(Arena* arena) {
  std::lock_guard lock(registry().mutex);
  registry().arenas.erase(arena);
}

void ForkGuard::remove(PeerArena* arena) {
  std::lock_guard lock(registry().mutex);
  registry().peers.erase(arena);
}

void ForkGuard::remove(Region* region) {
  std::lock_guard lock(registry().mutex);
  registry().regions.erase(region);
}

// Locks in the order of docs/threads.md.
void ForkGuard::before() {
  Registry& all = registry();
  all.mutex.lock();
  Pool::lock_all();
  for (Arena* arena : all.arenas) arena->mutex_.lock();
  try {
    size_t bytes = 0;
    for (Arena* arena : all.arenas) bytes += arena->prepare_inheritance();
    // The kernel would not refuse but kill, and hardly any child looks at gradients.
    if (bytes > 0 && bytes > available_memory()) return;
    for (Arena* arena : all.arenas) arena->copy_inheritance();
  } catch (const std::bad_alloc&) {
    for (Arena* arena : all.arenas) arena->inheritance_.clear();
  }
}

void ForkGuard::in_parent() {
  for (Arena* arena : registry().arenas) {
    arena->inheritance_.clear();
    arena->mutex_.unlock();
  }
  Pool::unlock_all();
  registry().mutex.unlock();
}

// Only async-signal-safe calls here: other threads' locks are lost in the child.
void ForkGuard::in_child() {
  for (Arena* arena : registry().arenas) {
    arena->become_forked();
    arena->mutex_.unlock();
  }
  for (PeerArena* peer : registry().peers) make_inaccessible(peer->mapping_.data(), peer->mapping_.bytes());
  for (Region* region : registry().regions) region->become_forked();
  Pool::unlock_all();
  registry().mutex.unlock();
}

}  // namespace syncengine::shm
