#include "transport/shm/fork_guard.h"

#include <pthread.h>

#include <mutex>
#include <set>

#include "transport/shm/arena.h"

namespace syncengine::shm {

namespace {

struct Registry {
  std::mutex mutex;
  std::set<Arena*> arenas;
  std::set<PeerArena*> peers;
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

void ForkGuard::remove(Arena* arena) {
  std::lock_guard lock(registry().mutex);
  registry().arenas.erase(arena);
}

void ForkGuard::remove(PeerArena* arena) {
  std::lock_guard lock(registry().mutex);
  registry().peers.erase(arena);
}

void ForkGuard::before() {
  registry().mutex.lock();
  for (Arena* arena : registry().arenas) arena->mutex_.lock();
}

void ForkGuard::in_parent() {
  for (Arena* arena : registry().arenas) arena->mutex_.unlock();
  registry().mutex.unlock();
}

// Only async-signal-safe calls here: other threads' locks are lost in the child.
void ForkGuard::in_child() {
  for (Arena* arena : registry().arenas) {
    arena->forked_ = true;
    // Tensors stay readable and writable, as private copies; control memory and staging become inaccessible.
    size_t position = 0;
    for (auto [offset, memory] : arena->tensors_) {
      make_inaccessible(arena->at(position), offset - position);
      bool is_private = !memory.pool && arena->severed({offset, offset + memory.bytes});
      if (!is_private && !make_private(arena->at(offset), memory.bytes))
        make_inaccessible(arena->at(offset), memory.bytes);
      position = offset + memory.bytes;
    }
    make_inaccessible(arena->at(position), arena->bytes() - position);
    arena->mutex_.unlock();
  }
  for (PeerArena* peer : registry().peers) make_inaccessible(peer->mapping_.data(), peer->mapping_.bytes());
  registry().mutex.unlock();
}

}  // namespace syncengine::shm
