// Takes memory out of a shared mapping: a private copy of its present content is made first, and put in its place then
// or later, in a forked child.
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

 private:
  UniqueFd fd_;
  ino_t number_ = 0;
  off_t bytes_ = 0;
};

class PrivateCopy {
 public:
  explicit PrivateCopy(size_t bytes);  // addresses; it takes memory where it is filled
  PrivateCopy(PrivateCopy&& other) noexcept;
  PrivateCopy& operator=(PrivateCopy&&) = delete;
  ~PrivateCopy();

  // Copies [from, from + bytes) to `offset`.
  void fill(size_t offset, const std::byte* from, size_t bytes);
  // The same from [begin, begin + bytes) of `file`, as the kernel copies at a fork: others may be writing there.
  // Returns false if it can't be read.
  bool read(size_t offset, int file, size_t begin, size_t bytes);
  // Moves the whole copy to `address`, over what is mapped there. Async-signal-safe.
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
