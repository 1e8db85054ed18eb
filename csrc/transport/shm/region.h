// Memory that the ranks of a host have in common, for as long as any of them maps it: a sealed memfd that one of them
// has made. A header in front of the users' bytes says how far the ranks are with updates of them.
//
// Ownership: shared_ptr; every tensor in it holds it. Thread-safety: any thread. Aliasing: who may write which bytes,
// and when, is up to the users. Failure: throws InvalidUsage with the numbers when memory is short. A forked child maps
// it copy-on-write: nothing is copied at the fork, the child reads what is there, and what it writes is its own.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/descriptors.h"
#include "base/memory.h"
#include "transport/shm/layout.h"
#include "transport/shm/private_copy.h"

namespace syncengine::shm {

// The ranks' progress with updates, which are numbered from 1. An update begins when all ranks have agreed to it. If
// some of them can no longer find out whether all have, the first rank to record a decision decides for all.
struct RegionHeader {
  uint64_t magic;
  uint64_t bytes;                              // bytes behind this header, for ranks that open the region
  alignas(64) std::atomic<uint64_t> decision;  // on the last update: twice its number, plus 1 if it takes place
  alignas(64) std::atomic<uint64_t> torn;      // the update that will never be complete, or 0
  struct alignas(64) Done {
    std::atomic<uint64_t> update;  // the last that this rank has completed
  } done[kMaxLocalRanks];
};

class Region : public std::enable_shared_from_this<Region> {
 public:
  // Creates `bytes` of zeros; pages are allocated when they are touched.
  static std::shared_ptr<Region> create(size_t bytes);
  // Opens a region that another rank has created. Throws InvalidUsage if `fd` is anything else.
  static std::shared_ptr<Region> open(UniqueFd fd);

  int fd() const { return file_.get(); }
  size_t bytes() const { return mapping_.bytes() - kHead; }
  // Throws InvalidUsage if [offset, offset + bytes) is outside.
  std::byte* at(size_t offset, size_t bytes) const;

  // Records the decision `proceeds` on update `number` if no rank has before, and returns the decision that counts.
  bool decide(uint64_t number, bool proceeds);
  void complete(int rank, uint64_t number);
  std::vector<uint64_t> completed(int ranks) const;  // by rank
  void tear(uint64_t number);                        // later calls change nothing
  uint64_t torn() const { return header().torn.load(std::memory_order_acquire); }

  // Replaces the mapping by a private copy at the same addresses. Nobody in this process may write meanwhile. Returns
  // false, and changes nothing, if memory is short.
  bool detach();
  bool is_shared() const { return shared_; }

 private:
  static constexpr size_t kHead = round_up(sizeof(RegionHeader), kSmallestPage);

  Region(UniqueFd fd, size_t bytes);
  RegionHeader& header() const { return *reinterpret_cast<RegionHeader*>(mapping_.data()); }
  void become_forked();  // in the child; async-signal-safe

  MappedFile file_;  // kept for forked children, too
  Mapping mapping_;
  std::mutex mutex_;  // held while detaching
  std::atomic<bool> shared_ = true;
  ForkGuard guard_{[this] { become_forked(); }};
};

}  // namespace syncengine::shm
