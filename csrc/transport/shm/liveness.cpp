#include "transport/shm/liveness.h"

#include <cerrno>

namespace syncengine::shm {

void prepare_liveness(ArenaHeader& header) {
  pthread_mutexattr_t attributes;
  pthread_mutexattr_init(&attributes);
  pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
  pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
  for (auto& mutex : header.alive) pthread_mutex_init(&mutex, &attributes);
  pthread_mutexattr_destroy(&attributes);
}

void hold_all(ArenaHeader& header, int watchers) {
  for (int watcher = 0; watcher < watchers; ++watcher) pthread_mutex_lock(&header.alive[watcher]);
}

void release_all(ArenaHeader& header, int watchers) {
  for (int watcher = 0; watcher < watchers; ++watcher) pthread_mutex_unlock(&header.alive[watcher]);
}

bool found_dead(ArenaHeader& header, int me) {
  pthread_mutex_t& mutex = header.alive[me];
  int result = pthread_mutex_trylock(&mutex);
  if (result == EBUSY) return false;
  if (result == EOWNERDEAD) pthread_mutex_consistent(&mutex);
  if (result == EOWNERDEAD || result == 0) pthread_mutex_unlock(&mutex);
  return result == EOWNERDEAD || result == ENOTRECOVERABLE;
}

}  // namespace syncengine::shm
