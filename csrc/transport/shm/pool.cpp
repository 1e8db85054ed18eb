#include "transport/shm/pool.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

#include "base/memory.h"
#include "transport/shm/arena.h"

namespace syncengine::shm {

namespace {

constexpr size_t kStep = 4 << 20;  // committed at a time

unsigned forks = 0;  // forks between this process and the one that loaded the library, since the first pool
std::mutex create_mutex;
std::atomic<Pool*> first{nullptr};

}  // namespace

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

Pool& Pool::create(std::shared_ptr<Arena> arena, std::byte* data, size_t bytes) {
  [[maybe_unused]] static int once = pthread_atfork(nullptr, nullptr, [] { ++forks; });
  std::lock_guard lock(create_mutex);
  Pool* pool = first.load();
  while (pool && pool->extent_.load() != nullptr) pool = pool->next_;  // a pool that was given up is used again
  bool fresh = pool == nullptr;
  if (fresh) pool = new Pool;
  {
    std::lock_guard inner(pool->mutex_);
    pool->arena_ = std::move(arena);
    pool->data_ = data;
    pool->bytes_ = bytes;
    pool->shortage_.clear();
    pool->open_ = true;
    pool->forks_ = forks;
    pool->used_ = pool->committed_ = pool->live_ = 0;
    pool->heap_.emplace(0, bytes);
    pool->sizes_.clear();
    pool->recent_.clear();
    pool->extent_.store(&pool->extents_.emplace_back(data, data + bytes), std::memory_order_release);
  }
  if (fresh) {
    pool->next_ = first.load();
    first.store(pool);
  }
  return *pool;
}

Pool* Pool::find(const void* block) {
  for (Pool* pool = first.load(std::memory_order_acquire); pool; pool = pool->next_) {
    if (pool->owns(block, 1)) return pool;
  }
  return nullptr;
}

bool Pool::owns(const void* data, size_t bytes) const {
  const auto* memory = static_cast<const std::byte*>(data);
  const Bounds* extent = extent_.load(std::memory_order_acquire);
  return extent && memory >= extent->begin && memory + bytes <= extent->end;
}

void* Pool::allocate(size_t bytes) {
  if (forked()) return nullptr;
  std::lock_guard lock(mutex_);
  if (!open_) return nullptr;
  void* block = take(round_up(bytes, kPage));
  if (block) ++live_;
  return block;
}

void* Pool::take(size_t bytes) {
  if (auto recent = recent_.find(bytes); recent != recent_.end() && !recent->second.empty()) {
    size_t offset = recent->second.back();
    recent->second.pop_back();
    return data_ + offset;
  }
  auto offset = heap_->allocate(bytes, kPage);
  if (!offset || *offset + bytes > used_) {
    // No free range below `used_` is large enough. Together with released blocks one may be, so these are freed first.
    // If the pool must still grow, the pages of all that is free are given back.
    if (offset) heap_->release(*offset, bytes);
    flush();
    offset = heap_->allocate(bytes, kPage);
    if (offset && *offset + bytes > used_) discard_free();
  }
  const size_t end = offset ? *offset + bytes : used_ + bytes;
  if (end > committed_) {
    const size_t wanted = round_up(end, kStep);
    shortage_ = wanted > bytes_
                    ? "no room for " + std::to_string(wanted) + " bytes of gradients in the " + std::to_string(bytes_) +
                          " that they may take of the arena; raise SYNCENGINE_ARENA_BYTES"
                    : arena_->commit(data_, wanted);
    if (!shortage_.empty()) {
      if (offset) heap_->release(*offset, bytes);
      return nullptr;
    }
    committed_ = wanted;
  }
  used_ = std::max(used_, end);
  sizes_[*offset] = bytes;
  return data_ + *offset;
}

std::string Pool::shortage() const {
  if (forked()) return {};
  std::lock_guard lock(mutex_);
  return shortage_;
}

void Pool::flush() {
  for (auto& [bytes, offsets] : recent_) {
    for (size_t offset : offsets) {
      sizes_.erase(offset);
      heap_->release(offset, bytes);
    }
    offsets.clear();
  }
}

void Pool::discard_free() {
  for (auto [offset, bytes] : heap_->free())
    if (offset < used_) arena_->discard(data_ + offset, std::min(bytes, used_ - offset));
}

void Pool::join() {
  if (forked()) return;
  std::lock_guard lock(mutex_);
  ++models_;
}

void Pool::leave() {
  if (forked()) return;
  {
    std::lock_guard lock(mutex_);
    --models_;
  }
  trim();
}

void Pool::trim() {
  if (forked()) return;
  std::lock_guard lock(mutex_);
  if (!arena_) return;
  flush();
  discard_free();
}

void Pool::release(void* block) {
  auto* const data = static_cast<std::byte*>(block);
  const auto offset = static_cast<size_t>(data - data_);
  if (forked()) return arena_->discard(data, sizes_.at(offset));
  std::shared_ptr<Arena> last;  // destroyed after the lock is released
  std::lock_guard lock(mutex_);
  auto size = sizes_.find(offset);
  const size_t bytes = size->second;
  if (arena_->gives_up(data, bytes)) {
    sizes_.erase(size);
  } else if (models_ > 0) {
    recent_[bytes].push_back(offset);
  } else {
    sizes_.erase(size);
    arena_->discard(data, bytes);
    heap_->release(offset, bytes);
  }
  --live_;
  last = take_if_over();
}

void Pool::close() {
  if (forked()) return;
  std::shared_ptr<Arena> last;
  std::lock_guard lock(mutex_);
  open_ = false;
  last = take_if_over();
}

// Returns, and drops, the pool's reference to its arena if no block is in use and none will be handed out any more.
std::shared_ptr<Arena> Pool::take_if_over() {
  if (open_ || live_ > 0) return {};
  extent_.store(nullptr);
  return std::exchange(arena_, nullptr);
}

void Pool::lock_all() {
  create_mutex.lock();
  for (Pool* pool = first.load(); pool; pool = pool->next_) pool->mutex_.lock();
}

void Pool::unlock_all() {
  for (Pool* pool = first.load(); pool; pool = pool->next_) pool->mutex_.unlock();
  create_mutex.unlock();
}

bool Pool::forked() const { return forks_ != forks; }

}  // namespace syncengine::shm
