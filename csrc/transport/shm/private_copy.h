// Takes memory out of a shared mapping: a private copy of its present content is put in its place; in a forked child
// the kernel copies what is written.
//
// Ownership: the copy's memory is its own until it is put. Thread-safety: one thread. Failure: returns false where
// memory is short.
#pragma once

#include <sys/types.h>

#include <variant>
#include <vector>

#include "base/descriptors.h"
#include "base/memory.h"

namespace syncengine::shm {

// The file behind a mapping, kept for what it tells about pages.
class MappedFile {
 public:
  explicit MappedFile(UniqueFd fd);

  int get() const { return fd_.get(); }
  void reset() { fd_.reset(); }
  // Not if somebody has closed all descriptors of this process, and opened others.
  bool is_there() const;
  // Of `range`, what it has pages for, swapped out or not; nothing else of it was ever written. All of it if the file
  // does not tell.
  std::vector<Range> pages_in(Range range) const;
  // In a forked child: from now on what is written to `range` of the mapping at `base` is its own; it sees what others
  // write elsewhere. Where there is no room for that, it may only read, or not even that; if the kernel refuses this,
  // too, the child ends. Async-signal-safe.
  void keep_writes(std::byte* base, Range range) const;

 private:
  UniqueFd fd_;
  ino_t number_ = 0;
  off_t bytes_ = 0;
};

class PrivateCopy {
 public:
  explicit PrivateCopy(size_t bytes);  // addresses; it takes memory where it is filled
  PrivateCopy(const PrivateCopy&) = delete;
  ~PrivateCopy();

  // Copies [from, from + bytes) to `offset`.
  void fill(size_t offset, const std::byte* from, size_t bytes);
  // Moves the whole copy to `address`, over what is mapped there.
  bool put(std::byte* address);

 private:
  std::byte* data_;  // null: there were no addresses, or it has been put
  size_t bytes_;
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
