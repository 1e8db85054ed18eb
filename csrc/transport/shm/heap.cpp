#include "transport/shm/heap.h"

#include "base/alignment.h"

namespace syncengine::shm {

std::optional<size_t> Heap::allocate(size_t bytes, size_t alignment) {
  std::lock_guard lock(mutex_);
  for (auto range = free_.begin(); range != free_.end(); ++range) {
    auto [begin, length] = *range;
    size_t offset = round_up(begin, alignment);
    if (offset + bytes > begin + length) continue;
    free_.erase(range);
    if (offset > begin) free_.emplace(begin, offset - begin);
    if (offset + bytes < begin + length) free_.emplace(offset + bytes, begin + length - offset - bytes);
    return offset;
  }
  return std::nullopt;
}

void Heap::release(size_t offset, size_t bytes) {
  std::lock_guard lock(mutex_);
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == offset + bytes) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      previous->second += bytes;
      return;
    }
  }
  free_.emplace(offset, bytes);
}

}  // namespace syncengine::shm
