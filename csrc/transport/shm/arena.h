// This rank's shared memory: one sealed memfd without a name, which goes with the last process that maps it.
//
// Ownership: shared_ptr; each Block keeps its arena mapped. Thread-safety: any thread. Aliasing: peers read and write
// what layout.h says. Failure: throws InvalidUsage with the numbers when memory is short. A forked child maps it
// copy-on-write, as a Region, and does not map the peers' arenas; `forked()` says so. What it frees of its copies goes
// back to the system.
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
  ~PeerArena();
  PeerArena(const PeerArena&) = delete;

  ArenaHeader& header() const { return *reinterpret_cast<ArenaHeader*>(mapping_.data()); }
  // The memory at `offset`, which came from a peer: throws InvalidUsage if [offset, offset + bytes) is not inside,
  // behind the header, or `offset` is no multiple of `alignment`.
  std::byte* at(uint64_t offset, size_t bytes, size_t alignment = 1) const;
  // Gives back the pages of its gradients, for all who map them: the owner is dead, and nobody reads them any more. If
  // the kernel refuses, they go with the last process that maps them.
  void discard_pool() const;

 private:
  friend class ForkGuard;
  bool is_inside(uint64_t offset, uint64_t bytes) const;
  Mapping mapping_;
};

// Of each rank's arena where the user chose nothing: the machine's memory, or less, so that the arenas of all ranks, of
// which each process maps every one, leave half of the addresses that it may still take (ulimit -v, other
// reservations).
size_t default_arena_bytes(size_t memory, int ranks);

// Throws InvalidUsage if memory of this process could not be severed: it might change under the program's hands.
void throw_if_exposed();

class Arena : public std::enable_shared_from_this<Arena> {
 public:
  // `bytes` of address space; pages are taken when they are touched.
  static std::shared_ptr<Arena> create(size_t bytes);
  ~Arena();

  ArenaHeader& header() const { return *reinterpret_cast<ArenaHeader*>(mapping_.data()); }
  size_t bytes() const { return mapping_.bytes(); }
  int fd() const { return file_.get(); }

  std::byte* at(size_t offset) const { return mapping_.data() + offset; }
  // Offset of [data, data + bytes) in this arena, or -1 if it lies elsewhere or was severed.
  int64_t offset_of(const void* data, size_t bytes) const;

  // Whole pages. Checks the machine's and the cgroup's free memory before it hands them out.
  std::shared_ptr<void> allocate_tensor(size_t bytes);
  // Zeroed memory for a communicator.
  size_t allocate_group(size_t bytes);
  // Gives it back, some time after `is_unused` says that no peer will touch it any more.
  void retire_group(size_t offset, size_t bytes, std::function<bool()> is_unused);

  // Cuts the pages of [offset, offset + bytes), which lie in one tensor, loose from the peers: a private copy at the
  // same addresses. A rank that was stopped in the middle of a collective can write into them no more. Nobody may write
  // to them meanwhile. Where the kernel refuses it throws Aborted: what it has not cut loose is not severed, and from
  // then on throw_if_exposed() throws.
  void sever_tensor(size_t offset, size_t bytes);
  bool is_severed(size_t offset, size_t bytes = 1) const;  // any of it

  // Half of the arena's addresses for gradients; null if there is no room. Once.
  Pool* create_pool();

  bool forked() const { return forked_; }

 private:
  friend class ForkGuard;
  Arena(UniqueFd fd, size_t bytes);
  void release_tensor(size_t offset, size_t bytes);
  void discard(std::byte* data, size_t bytes) const;  // gives whole pages back; what is read there then is zero
  bool discard_from_file(Range range) const;
  // Discards all of it. Returns what may be used again: not what is severed, since a rank that was stopped may write
  // there whenever it goes on. Under mutex_.
  std::vector<Range> give_back(Range range) const;

  MappedFile file_;
  Mapping mapping_;
  Heap heap_;
  bool severed(Range range) const;                  // any of it; under mutex_
  bool lies_in_tensor(size_t offset) const;         // under mutex_
  std::vector<Range> unsevered(Range range) const;  // under mutex_
  void become_forked();                             // in the child; async-signal-safe

  mutable std::mutex mutex_;
  std::map<size_t, size_t> tensors_;  // bytes by offset; of the pool those that it has taken
  struct RetiredGroup {
    size_t offset, bytes;
    std::function<bool()> is_unused;
  };
  void reclaim_groups();
  std::vector<RetiredGroup> retired_;
  std::vector<Range> severed_;
  std::atomic<bool> any_severed_ = false;  // spares offset_of() the lock
  std::vector<Range> inherited_;           // by a forked child: what is not severed; nothing is allocated in a fork
  bool forked_ = false;
};

// Death notice between processes of one host: robust mutexes, which the kernel marks within milliseconds of a process's
// death, before its memory is torn down (sockets and pidfds speak up only after that: seconds for a large process).
//
// Thread-safety: hold_all/release_all belong to one thread, which must live as long as the rank; found_dead() to one
// thread at a time.

// Whether the kernel does this for the threads of this process, as one that ended with a mutex has shown once. A
// sandbox may refuse it.
bool tells_of_deaths();

// Initializes `header.alive`; before any peer maps it.
void prepare_liveness(ArenaHeader& header);

// Called by the rank's longest-lived thread: its death is the rank's death.
void hold_all(ArenaHeader& header, int watchers);
void release_all(ArenaHeader& header, int watchers);

// Whether the owner of `header` died without release_all(). It may still be dying: other threads of it may run for a
// moment. `me` is the watcher's local rank. True once, the caller remembers it.
bool found_dead(ArenaHeader& header, int me);

}  // namespace syncengine::shm
