// The ranks of this host, and the members of one communicator among them: where the memory of each is mapped.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/trace.h"
#include "bootstrap/host.h"
#include "engine/progress/bell.h"
#include "engine/progress/work.h"
#include "transport/shm/arena.h"

namespace syncengine {

// A range of this rank's arena that peers may access, since they have been told where it is.
struct ArenaRange {
  size_t offset, bytes;
  bool apart;      // severed at a failure: peers may still write there, or send on what its owner writes next
  size_t readers;  // for Arena::sever_tensor()
};

// The ranks of this host, by local rank: their arenas, their names in texts, and which of them have died.
//
// Ownership: of the mappings of the peers' arenas; this rank's arena outlives it. Thread-safety: constant but for
// is_dead(), which is called under the progress lock. Failure: none.
class LocalRanks {
 public:
  // `peers` has the arenas by local rank, null for this rank, `me`. `names` has each one's rank in the job. `watches`
  // has processes by rank in the job, and includes ranks that count as other hosts' though they run on this machine.
  LocalRanks(shm::ArenaHeader& own, std::vector<std::unique_ptr<shm::PeerArena>> peers, int me, std::vector<int> names,
             std::map<int, ProcessWatch> watches)
      : own_(own), peers_(std::move(peers)), me_(me), names_(std::move(names)), watches_(std::move(watches)) {}

  int size() const { return static_cast<int>(peers_.size()); }
  int me() const { return me_; }
  shm::PeerArena* peer(int rank) const { return peers_[rank].get(); }
  int in_job(int rank) const { return names_[rank]; }
  std::string name(int rank) const { return "rank " + std::to_string(names_[rank]); }
  // Returns pointers to the same part of each rank's arena header, by local rank.
  template <class Part>
  std::vector<Part*> each(Part shm::ArenaHeader::* part) const {
    std::vector<Part*> parts;
    for (const auto& peer : peers_) {
      shm::ArenaHeader& header = peer ? peer->header() : own_;  // named: of `?:`, g++ 12 takes parts from a copy
      parts.push_back(&(header.*part));
    }
    return parts;
  }
  // Whether the rank's process has died or ended otherwise. Both its mutex and its process handle are asked: some
  // systems lack robust mutexes, and the handle reports a death later.
  bool is_dead(int rank) {
    uint64_t bit = uint64_t{1} << rank;
    if (rank == me_) return false;
    if (!(dead_ & bit) && (shm::found_dead(peers_[rank]->header(), me_) || has_ended(names_[rank]))) dead_ |= bit;
    return dead_ & bit;
  }
  // Whether the process of that rank of the job has ended. Returns false if sees_process() returns false.
  bool has_ended(int in_job) {
    auto found = watches_.find(in_job);
    return found != watches_.end() && found->second.has_ended();
  }
  bool sees_process(int in_job) const { return watches_.contains(in_job); }

 private:
  shm::ArenaHeader& own_;
  std::vector<std::unique_ptr<shm::PeerArena>> peers_;
  int me_;
  std::vector<int> names_;
  std::map<int, ProcessWatch> watches_;
  uint64_t dead_ = 0;
};

// The members of one communicator on this host: where the block of each lies, and how to wake them.
//
// Ownership: views; the engine owns the arenas. Thread-safety: constant after construction.
struct Group {
  int rank;
  int size;
  uint64_t id;                           // for traces: the same on all members
  std::vector<int> global_ranks;         // of each member: its rank in the job, for texts
  std::vector<int> local_ranks;          // of each member: its index among the arenas
  std::vector<uint64_t> offsets;         // of each member: where its block lies in its arena
  std::vector<shm::GroupBlock*> blocks;  // of each member
  std::vector<shm::PeerArena*> arenas;   // of each member; null for this rank
  shm::Arena* arena;                     // this rank's
  Bell* bell;

  shm::GroupBlock& block(int member) const { return *blocks[member]; }
  shm::GroupBlock& own() const { return *blocks[rank]; }
  std::string name(int member) const { return "rank " + std::to_string(global_ranks[member]); }

  // Whether a member has failed and `concerns` returns true for its end record. Then what the caller has read of that
  // member's memory may already have been changed. Called after the reading.
  template <class Concerns>
  bool any_failed(const Concerns& concerns) const {
    std::atomic_thread_fence(std::memory_order_acquire);  // what was read of a peer's memory was read before
    for (int member = 0; member < size; ++member) {
      const shm::EndRecord& end_record = block(member).end_record;
      auto standing = static_cast<shm::Standing>(end_record.standing.load(std::memory_order_acquire));  // acquire: all
      if (standing == shm::Standing::Failed && concerns(end_record)) return true;
    }
    return false;
  }

  // The memory of `member`, or of this rank, at an offset that it has published. Throws InvalidUsage if the memory lies
  // outside the part of its arena that it may publish, or is not aligned.
  std::byte* memory(int member, uint64_t offset, size_t bytes, size_t alignment) const {
    return member == rank ? arena->at(offset) : arenas[member]->at(offset, bytes, alignment);
  }
};

// Records an event of an operation in the trace, from time `begin` to time `end`.
inline void trace_operation(trace::Kind kind, int64_t begin, int64_t end, const Group& group, const Work::Place& place,
                            uint64_t detail = 0, uint32_t text = 0) {
  trace::record({.kind = kind,
                 .begin = begin,
                 .end = end,
                 .group = group.id,
                 .lane = static_cast<uint16_t>(place.lane),
                 .place = place.number,
                 .epoch = place.epoch,
                 .detail = detail,
                 .text = text});
}

}  // namespace syncengine
