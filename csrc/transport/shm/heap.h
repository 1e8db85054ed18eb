// First-fit allocator of page-aligned ranges in an arena. Hands out offsets and never touches the memory.
//
// Thread-safety: any thread. Failure: allocate() returns nothing when no range is large enough.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <optional>

namespace syncengine::shm {

class Heap {
 public:
  Heap(size_t begin, size_t end) { free_.emplace(begin, end - begin); }

  std::optional<size_t> allocate(size_t bytes, size_t alignment);
  void release(size_t offset, size_t bytes);

 private:
  std::mutex mutex_;
  std::map<size_t, size_t> free_;  // offset -> bytes, never adjacent
};

}  // namespace syncengine::shm
