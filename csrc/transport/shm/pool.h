// Blocks of whole pages for gradients, in the arena, where peers reach them. A released block keeps its pages for the
// next step, until its addresses are needed for blocks of other sizes, until trim(), or until any model leaves.
//
// Ownership: pools are never destroyed, so that a block may be released at any time: also after close(), when the last
// block lets go of the memory, and in forked children, where releasing frees their copy. Thread-safety: any thread;
// find() takes no lock. Failure: allocate() returns null when the pool is closed, forked or full, or memory is short.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace syncengine::shm {

class Arena;

// First-fit allocator of page-aligned ranges in an arena. Hands out offsets and never touches the memory.
//
// Thread-safety: any thread. Failure: allocate() returns nothing when no range is large enough.
class Heap {
 public:
  Heap(size_t begin, size_t end) { free_.emplace(begin, end - begin); }

  std::optional<size_t> allocate(size_t bytes, size_t alignment);
  void release(size_t offset, size_t bytes);
  const std::map<size_t, size_t>& free() const { return free_; }  // while nobody changes it

 private:
  std::mutex mutex_;
  std::map<size_t, size_t> free_;  // offset -> bytes, never adjacent
};

class Pool {
 public:
  static Pool& create(std::shared_ptr<Arena> arena, std::byte* data, size_t bytes);  // of at least a page in `arena`

  static Pool* find(const void* block);
  bool owns(const void* data, size_t bytes) const;

  bool forked() const;  // this process is a child of the one that created the pool

  void* allocate(size_t bytes);
  void release(void* block);
  // The reason why the pool could not grow when it last had to; empty if it could.
  std::string shortage() const;
  void close();
  // Called by a model that begins, or ends, to take its gradients from here. Each join() is followed by a leave(),
  // except in forked children. leave() trims.
  void join();
  void leave();
  // Gives back the pages of all released blocks.
  void trim();

  // Lock and unlock all pools around a fork, before the arenas' locks, so that no block is taken or released meanwhile.
  static void lock_all();
  static void unlock_all();

 private:
  Pool() = default;
  void* take(size_t bytes);
  void flush();
  void discard_free();
  std::shared_ptr<Arena> take_if_over();

  struct Bounds {
    const std::byte *begin, *end;
  };
  std::atomic<const Bounds*> extent_{nullptr};  // null: this pool serves nobody
  std::deque<Bounds> extents_;                  // all extents so far, since a thread may still look at an earlier one
  Pool* next_ = nullptr;
  unsigned forks_ = 0;  // the value of `forks` when the pool was created

  mutable std::mutex mutex_;
  std::shared_ptr<Arena> arena_;  // kept until the last block is released; null: this pool has no memory
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  std::string shortage_;
  bool open_ = false;
  size_t used_ = 0;  // bytes from the beginning that were handed out so far
  size_t committed_ = 0, live_ = 0;
  size_t models_ = 0;                         // includes models of an earlier engine, which may outlive their memory
  std::unordered_map<size_t, size_t> sizes_;  // of each block, handed out or recent, by offset
  std::unordered_map<size_t, std::vector<size_t>> recent_;  // released blocks by size, the warmest last
  std::optional<Heap> heap_;                                // of what is neither handed out nor recent
};

}  // namespace syncengine::shm
