// What tests of shared memory have in common.
#pragma once

#include <sys/stat.h>

#include <cstring>
#include <memory>

#include "test.h"
#include "transport/shm/arena.h"

namespace syncengine::testing {

inline constexpr size_t kMiB = 1 << 20;
inline constexpr bool kCountsBytes = kSlowdown == 1;

inline char* chars(const std::shared_ptr<void>& memory) { return static_cast<char*>(memory.get()); }

inline bool all_are(const char* data, size_t bytes, char value) {
  return bytes == 0 || (data[0] == value && std::memcmp(data, data + 1, bytes - 1) == 0);  // one check for sanitizers
}

// The bytes of memory that the kernel has given to an arena.
inline size_t pages_of(const shm::Arena& arena) {
  struct stat status{};
  CHECK_EQ(fstat(arena.fd(), &status), 0);
  return static_cast<size_t>(status.st_blocks) * 512;
}

// A pool in an arena of so many bytes.
template <size_t kBytes>
struct PoolOf {
  std::shared_ptr<shm::Arena> arena = shm::Arena::create(kBytes);
  shm::Pool& pool = *arena->create_pool();
  PoolOf() { pool.join(); }
  ~PoolOf() { pool.close(), pool.leave(); }

  char* take(size_t bytes) { return static_cast<char*>(pool.allocate(bytes)); }
};

}  // namespace syncengine::testing
