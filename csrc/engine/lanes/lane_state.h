// State that the phases of a lane share: its open operations, each phase's progress, what the peers have published of
// theirs; and the conditions of each phase's next step.
//
// Ownership: the lane's. Thread-safety: under the engine's progress lock. Failure: compare() throws Mismatch.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "base/checked.h"
#include "collectives/plan.h"
#include "collectives/runner.h"
#include "engine/lanes/slots.h"
#include "engine/progress/group.h"
#include "engine/progress/work.h"

namespace syncengine {

struct LaneState {
  static constexpr uint64_t kNoKey = ~uint64_t{0};
  struct Item {
    Operation operation;
    std::shared_ptr<Work> work;
    Clock::time_point since;
    uint64_t key = kNoKey;                    // announcement slot
    std::shared_ptr<const Slots> slots = {};  // the slots of `key`, held until the operation has ended
  };
  struct Active {
    Item item;
    bool in_arena;          // all its spans lie there, as published
    uint64_t verified = 0;  // peers whose record agreed
    bool path_known = false;
    Path path = Path::Staged;
    uint64_t chunks = 0;
    size_t chunk_bytes = 0;
    uint64_t end = 0;  // chunks of the lane, including this operation's
    bool reduces = false, pulls = false, peers_read_user = false;
    std::vector<SpanList> spans;  // direct path: of each rank
    int64_t opened = 0;           // time of the opening, while this rank is traced
  };
  struct Cursor {
    uint64_t operation = 0;  // of the lane
    uint64_t chunk = 0;      // of the operation
    uint64_t total = 0;      // of the lane

    void advance(const Active& active) {
      ++total;
      if (++chunk < active.chunks) return;
      chunk = 0;
      ++operation;
    }
  };
  struct Counters {
    uint64_t operations = 0, staged_bytes = 0, direct_bytes = 0, one_shot_bytes = 0;
    uint64_t interhost_bytes = 0;  // sent to other hosts
  };
  using Field = std::atomic<uint64_t> shm::LaneProgress::*;

  LaneState(const Group& lane_group, int lane) : group(lane_group), id(lane), runner(group.rank, group.size) {}

  Active& at(uint64_t operation) { return active[operation - retired]; }
  const Active& at(uint64_t operation) const { return active[operation - retired]; }
  shm::OpRecord& record(int member, uint64_t operation) const {
    return group.block(member).lanes[id].records[operation % shm::kRecords];
  }
  // A copy of the member's record. Throws PeerLost if it is damaged.
  Checked<shm::OpRecord> checked_record(int member, uint64_t operation) const;
  // Whether `member` has met NaN or infinity in its part of the result. Valid once the operation's chunks are reduced.
  std::atomic<uint64_t>& noted(int member, uint64_t operation) const {
    return group.block(member).lanes[id].noted[operation % shm::kRecords];
  }
  shm::LaneProgress& own() const { return progress_of(group.rank); }
  shm::LaneProgress& progress_of(int member) const { return group.block(member).lanes[id].progress; }

  bool takes_slot(const Active& active) const {
    return active.path_known && (active.path != Path::Direct || always_slots);
  }
  // Returns the peers whose counter `field` is below `count`: all such peers if `all`, else one of them.
  uint64_t behind(Field field, uint64_t count, bool all) const;
  // Compares peers' records with this rank's as they come in, and takes over their flags. Returns true once all agree.
  bool compare(uint64_t operation, Active& active);
  // Whether a peer has failed before this operation had ended there.
  bool is_cut_off(uint64_t operation) const {
    return group.any_failed([&](const shm::EndRecord& end_record) { return end_record.ended[id] <= operation; });
  }
  void point_bases(const Active& active, uint64_t chunk);  // sets the runner's bases; `chunk` counts in the lane

  const Group& group;
  const int id;
  const uint64_t peers = ~uint64_t{0} >> (64 - group.size) & ~(uint64_t{1} << group.rank);
  std::deque<Item> queue;     // not opened yet
  uint64_t opens_after = 0;   // operations that must have ended before the next one opens, as one works on its memory
  std::deque<Active> active;  // operations retired .. opened - 1
  uint64_t retired = 0, opened = 0;
  Cursor staged, reduced, pulled;
  Runner runner;
  size_t moved_bytes = 0;
  Counters counters;
  size_t slots = shm::kSlots, slot_bytes = shm::kSlotBytes;
  bool always_slots = false;  // a chunk counts as a user of a slot on the direct path, too
};

// Takes the place of a lane's reduce phase if its operations reach over hosts: the chunks on their way between hosts.
// hosts/interhost_exchange.h implements it.
//
// Ownership: the lane's, with whose state it works. Thread-safety: under the engine's progress lock. Failure: Mismatch,
// or the error that failed a transfer.

class Exchange {
 public:
  using Active = LaneState::Active;
  virtual ~Exchange() = default;

  virtual void on_opened(uint64_t operation) = 0;  // the operation's record is published on this host
  virtual Path wanted_path(const Active& active) const = 0;
  virtual size_t chunk_bytes(const Active& active) const = 0;  // the same on all hosts, whatever the path
  virtual void plan(const Chunk& chunk, ChunkPlan& plan) const = 0;
  // Takes the place of LaneState::compare(), and compares with the other hosts, too.
  virtual bool compare(uint64_t operation, Active& active) = 0;

  virtual bool advance() = 0;                          // returns whether anything moved
  virtual bool has_arrived(uint64_t chunk) const = 0;  // results of this chunk of the lane are in this host's memory
  virtual bool uses_own_memory(uint64_t chunk) const = 0;  // envelopes of this chunk still leave this rank's memory
  virtual void drop_all() = 0;                             // called when its transfers have been withdrawn
};

// The conditions of each phase's next step: for the steps themselves, for sleepers that must know who can wake them,
// and for errors that name ranks. A view of the lane's state and of its exchange.
struct LaneSteps {
  const LaneState& state;
  const Exchange* exchange;  // null within a host

  // Whether a phase has a next step, as far as this rank alone is concerned.
  bool has_retire() const { return state.pulled.operation != state.retired; }
  bool has_pull() const { return state.pulled.total != state.reduced.total; }
  bool has_reduce() const { return state.reduced.total != state.staged.total; }
  bool has_stage() const { return state.staged.operation != state.opened && has_slot(); }
  bool has_open() const {
    return !state.queue.empty() && state.active.size() != shm::kRecords && state.retired >= state.opens_after;
  }
  // Whether the next chunk needs no slot, or this rank has read the last chunk that was in its slot.
  bool has_slot() const {
    return state.pulled.total + state.slots > state.staged.total || !state.takes_slot(state.at(state.staged.operation));
  }

  // Return the members for whom a phase's next step waits, one bit per group rank: all of them if `all`, else one; none
  // if the step may be made. This rank's own bit means that its memory is still being sent to other hosts.
  uint64_t retire_blockers(bool all) const;
  uint64_t pull_blockers(bool all) const;
  uint64_t reduce_blockers(bool all) const;
  uint64_t stage_blockers(bool all) const;
  uint64_t open_blockers(bool all) const;
  uint64_t compare_blockers(bool all) const;  // for the oldest operation

  // Members whose next step this rank needs: all such members, or one for each reason to wait.
  uint64_t missing(bool all) const;
  // Members that hold up the oldest chunk. Others may be missing only because they wait for the same members.
  uint64_t blocking_ranks() const;
  // Members that have not made the call with this number.
  uint64_t not_called(uint64_t number) const { return state.behind(&shm::LaneProgress::called, number + 1, true); }
};

}  // namespace syncengine
