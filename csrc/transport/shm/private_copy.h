// Takes memory out of a shared mapping, by putting a private copy of its present content in its place, or, in a forked
// child, by having the kernel copy what is written.
//
// Ownership: a MappedFile owns its descriptor, and not the mapping. Thread-safety: one thread. Failure: returns false
// where memory is short.
#pragma once

#include <sys/types.h>

#include <variant>
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
  // False if somebody has closed this process's descriptors and opened others.
  bool is_there() const;
  // The parts of `range` that have pages, swapped out or not; no other part was ever written. Returns all of `range` if
  // the file can't tell.
  std::vector<Range> pages_in(Range range) const;
  // In a forked child, makes `range` of the mapping at `base` copy-on-write: what the child writes there is its own,
  // and it still sees what others write elsewhere. If there is no room for that, the range becomes read-only or
  // inaccessible; if the kernel refuses even this, the child ends. Async-signal-safe.
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

// Keeps a forked child (a DataLoader worker) out of the shared memory of its parent and of the parent's peers.

class Arena;
class PeerArena;
class Region;

class ForkGuard {
 public:
  using Memory = std::variant<Arena*, PeerArena*, Region*>;
  static void add(Memory memory);
  static void remove(Memory memory);

 private:
  static void before();
  static void in_parent();
  static void in_child();
};

}  // namespace syncengine::shm
