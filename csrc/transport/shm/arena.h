// This rank's shared memory: one sealed memfd without a name, which disappears with the last process that maps it.
//
// Ownership: shared_ptr; each Block keeps its arena mapped. Thread-safety: any thread. Aliasing: peers read and write
// what layout.h says. Failure: throws InvalidUsage with the numbers when memory is short. In a forked child forked() is
// true, the arena is mapped copy-on-write, as a Region is, and the peers' arenas are not mapped. Copies that the child
// frees go back to the system.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "base/descriptors.h"
#include "base/memory.h"
#include "transport/shm/layout.h"
#include "transport/shm/pool.h"
#include "transport/shm/private_copy.h"

namespace syncengine::shm {

// Another rank's arena, mapped here.
class PeerArena {
 public:
  PeerArena(int fd, size_t bytes);  // checks the seals and the magic; throws InvalidUsage

  ArenaHeader& header() const { return *reinterpret_cast<ArenaHeader*>(mapping_.data()); }
  // The memory at `offset`, a number that came from a peer. Throws InvalidUsage if [offset, offset + bytes) is not
  // inside the arena and behind its header, or if `offset` is no multiple of `alignment`.
  std::byte* at(uint64_t offset, size_t bytes, size_t alignment = 1) const;
  // Gives the pages of a dead owner's gradients back to the system, for all who map them. Called once nobody reads them
  // any more. If the kernel refuses, they go with the last process that maps them.
  void discard_pool() const;

 private:
  bool is_inside(uint64_t offset, uint64_t bytes) const;

  Mapping mapping_;
  ForkGuard guard_{[this] { close_in_child(mapping_.data(), mapping_.bytes()); }};
};

// The size of each rank's arena if the user has not chosen one: the machine's memory, or less. Every process maps the
// arenas of all ranks, which together may take half of the addresses that it has left (ulimit -v, other reservations).
size_t default_arena_bytes(size_t memory, int ranks);

// Throws InvalidUsage if severing memory of this process has failed: a peer may still change that memory.
void throw_if_exposed();

class Arena : public std::enable_shared_from_this<Arena> {
 public:
  // Reserves `bytes` of addresses; pages are allocated when they are touched.
  static std::shared_ptr<Arena> create(size_t bytes);

  ArenaHeader& header() const { return *reinterpret_cast<ArenaHeader*>(mapping_.data()); }
  size_t bytes() const { return mapping_.bytes(); }
  int fd() const { return file_.get(); }

  std::byte* at(size_t offset) const { return mapping_.data() + offset; }
  // The offset of [data, data + bytes) in this arena; -1 if any of them lie elsewhere or are severed (sever_tensor()).
  int64_t offset_of(const void* data, size_t bytes) const;

  // Allocates whole pages, after checking how much memory the machine and the cgroup have left.
  std::shared_ptr<void> allocate_tensor(size_t bytes);
  // Allocates zeroed memory for a communicator.
  size_t allocate_group(size_t bytes);
  // Gives a communicator's memory back, some time after `is_unused` says that no peer will touch it any more.
  void retire_group(size_t offset, size_t bytes, std::function<bool()> is_unused);

  // Severs [offset, offset + bytes), which lie in one tensor, from the peers: a private copy takes their pages' place,
  // or inaccessible pages if memory is short, so that a rank that was stopped in the middle of a collective can't write
  // there any more. Nobody may write to these bytes meanwhile, but to the rest of the first and last page. If Linux
  // refuses, throws Aborted; the rest is then not severed, and throw_if_exposed() throws from then on.
  //
  // `readers` is the offset of the block of a communicator, or 0. Its members may read these bytes after the tensor is
  // freed, and send them on to other hosts: the shared pages keep their content until that block is given back.
  void sever_tensor(size_t offset, size_t bytes, size_t readers = 0);
  bool is_severed(size_t offset, size_t bytes = 1) const;  // whether any of these bytes are

  // Makes a pool for gradients of half of the arena's addresses; null if there is no room. Called once.
  Pool* create_pool();

  bool forked() const { return forked_; }

 private:
  friend class Pool;
  struct RetiredGroup {
    size_t offset, bytes;
    std::function<bool()> is_unused;
  };
  struct Held {
    Range pages;
    size_t readers;
  };

  Arena(UniqueFd fd, size_t bytes);
  void release_tensor(size_t offset, size_t bytes);
  // Called before the pool at `pool` grows to `bytes`. Returns why it must not, if memory is short, else "".
  std::string commit(const std::byte* pool, size_t bytes);
  // If a block of the pool has severed pages, gives its memory back and returns true: it must not be handed out again.
  bool gives_up(const std::byte* block, size_t bytes);
  void discard(std::byte* data, size_t bytes) const;  // gives whole pages back, which read as zeros afterwards
  bool discard_from_file(Range range) const;
  void reclaim_groups();
  void become_forked();  // in the child; async-signal-safe

  // The functions below are called under mutex_.

  // Discards all pages in `range`, but keeps those that may still be read until their readers are gone. Returns what
  // may be allocated again: not what is severed, since a rank that was stopped may write there whenever it goes on.
  std::vector<Range> give_back(Range range);
  bool lies_in_tensor(size_t offset) const;
  bool may_be_read(Range part) const;
  std::vector<Range> unsevered(Range range) const;

  MappedFile file_;
  Mapping mapping_;
  Heap heap_;

  mutable std::mutex mutex_;
  std::map<size_t, size_t> tensors_;  // bytes by offset; in the pool, those of the blocks that are taken
  std::vector<RetiredGroup> retired_;
  std::vector<Held> held_;    // severed pages that members of a communicator may still read
  std::vector<Range> freed_;  // parts of these whose tensor is freed
  std::vector<Range> severed_;
  std::atomic<bool> any_severed_ = false;  // lets offset_of() do without the lock
  std::vector<Range> inherited_;           // in a forked child: what is not severed; nothing is allocated there
  bool forked_ = false;
  ForkGuard guard_{[this] { become_forked(); }, &mutex_};
};

// Notices of death between processes of one host, by robust mutexes. Linux marks these within milliseconds of a
// process's death, before it tears down the process's memory. Sockets and pidfds report a death only after that, which
// takes seconds for a large process.
//
// Thread-safety: hold_all/release_all belong to one thread, which must live as long as the rank; found_dead() to one
// thread at a time.

// Whether robust mutexes report deaths to this process: tried once, by a thread that ends while it holds one. A sandbox
// may forbid the calls that they need.
bool tells_of_deaths();

// Initializes `header.alive`, before any peer maps it.
void prepare_liveness(ArenaHeader& header);

// Take and release the mutexes that peers watch. Called by the rank's longest-lived thread, whose death is the rank's.
void hold_all(ArenaHeader& header, int watchers);
void release_all(ArenaHeader& header, int watchers);

// Whether the owner of `header` died without release_all(). Other threads of that process may still run for a moment.
// `me` is the watcher's local rank. Returns true only once; the caller remembers it.
bool found_dead(ArenaHeader& header, int me);

}  // namespace syncengine::shm
