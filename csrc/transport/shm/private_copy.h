// Takes memory out of a shared mapping: puts a private copy of its present content in its place, or, in a forked child,
// makes Linux copy each page that is written.
//
// Ownership: a MappedFile owns its descriptor, and not the mapping. Thread-safety: one thread. Failure: returns false
// where memory is short.
#pragma once

#include <sys/types.h>

#include <functional>
#include <mutex>
#include <vector>

#include "base/descriptors.h"
#include "base/memory.h"

namespace syncengine::shm {

// The file behind a mapping, which is kept open since it knows which pages exist.
class MappedFile {
 public:
  explicit MappedFile(UniqueFd fd);

  int get() const { return fd_.get(); }
  void reset() { fd_.reset(); }
  // Whether the descriptor is still that file's. False if some code has closed all descriptors and opened others.
  bool is_there() const;
  // The parts of `range` that have pages, swapped out or not; no other was ever written. All, if the file can't tell.
  std::vector<Range> pages_in(Range range) const;
  // In a forked child, makes `range` of the mapping at `base` copy-on-write: what the child writes is its own, and in
  // pages that it has not written it still sees what others write. If there is no room for that, the range becomes
  // read-only or inaccessible; if Linux refuses even this, the child ends. Async-signal-safe.
  void keep_writes(std::byte* base, Range range) const;
  // Puts a private copy of `range` in its place in the mapping at `base`. Returns false if memory is short. Nobody may
  // write to the range meanwhile, unless `own` is given: then the range is one page, in which other threads of this
  // process may write anywhere but to the byte at `own`, and all that they write stays, unless the file is gone.
  [[nodiscard]] bool make_private(std::byte* base, Range range, std::byte* own = nullptr) const;

 private:
  UniqueFd fd_;
  ino_t number_ = 0;
  off_t bytes_ = 0;
};

// Closes the parent's memory to a forked child, which ends if Linux refuses: it could write there. Async-signal-safe.
void close_in_child(void* data, size_t bytes);

// Keeps forked children (DataLoader workers) out of the shared memory of their parent and of the parent's peers.
//
// Each child calls `in_child` of all guards, while the thread that has forked holds their mutexes. `in_child` must be
// async-signal-safe, since locks of other threads stay locked in the child for ever.
class ForkGuard {
 public:
  explicit ForkGuard(std::function<void()> in_child, std::mutex* mutex = nullptr);
  ~ForkGuard();
  ForkGuard(const ForkGuard&) = delete;

 private:
  static void lock_all();
  static void unlock_all();

  const std::function<void()> in_child_;
  std::mutex* const mutex_;  // of what `in_child` touches; null if nothing is locked
};

}  // namespace syncengine::shm
