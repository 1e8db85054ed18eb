// Memory that the ranks of a host have in common, for as long as any of them maps it: a sealed memfd of its own, made
// by one of them. In front of the users' bytes lies what the ranks say about updates of them.
//
// Ownership: shared_ptr; every tensor in it holds it. Thread-safety: any thread. Aliasing: who may write which bytes,
// and when, is up to the users. Failure: throws InvalidUsage with the numbers when memory is short. A forked child maps
// it copy-on-write: nothing is copied at the fork, it reads what is there, what it writes is its own.
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

// What the ranks say about updates, which are numbered from 1. An update begins when all ranks have agreed to it; if
// some of them can't know that any more, the first to say so decides for all.
struct RegionHeader {
  uint64_t magic;
  uint64_t bytes;                              // behind this header; for who opens it
  alignas(64) std::atomic<uint64_t> decision;  // of the last update: twice its number, and 1 if it takes place
  alignas(64) std::atomic<uint64_t> torn;      // the update that will never be complete; 0: none
  struct alignas(64) Done {
    std::atomic<uint64_t> update;  // the last that this rank has completed
  } done[kMaxLocalRanks];
};

class Region : public std::enable_shared_from_this<Region> {
 public:
  // `bytes` of zeros; pages are taken when they are touched.
  static std::shared_ptr<Region> create(size_t bytes);
  // What another rank has created. Throws InvalidUsage if it is something else.
  static std::shared_ptr<Region> open(UniqueFd fd);
  ~Region();
  Region(const Region&) = delete;

  int fd() const { return file_.get(); }
  size_t bytes() const { return bytes_; }
  // Throws InvalidUsage if [offset, offset + bytes) is outside.
  std::byte* at(size_t offset, size_t bytes) const;

  // The decision on update `number`: `proceeds`, if nobody was first to say otherwise.
  bool decide(uint64_t number, bool proceeds);
  void complete(int rank, uint64_t number);
  std::vector<uint64_t> completed(int ranks) const;  // by rank
  void tear(uint64_t number);                        // the first counts
  uint64_t torn() const;

  // From now on a private copy at the same addresses. Nobody here may write meanwhile. False, and nothing happens, if
  // memory is short.
  bool detach();
  bool is_shared() const { return shared_; }

 private:
  friend class ForkGuard;
  explicit Region(UniqueFd fd, size_t bytes);
  RegionHeader& header() const { return *reinterpret_cast<RegionHeader*>(mapping_.data()); }
  void become_forked();  // in the child; async-signal-safe

  MappedFile file_;  // for children, too
  Mapping mapping_;
  const size_t bytes_;  // behind the header
  std::mutex mutex_;    // one detaches
  std::atomic<bool> shared_ = true;
};

}  // namespace syncengine::shm
