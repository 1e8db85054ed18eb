// A stream of operations that all ranks of a group run in the same order, chunk by chunk, each phase as far ahead as the
// peers allow: stage -> reduce -> pull. Operations of different lanes overtake each other; within a lane they pipeline.
//
// Ownership: owns its queued operations. Thread-safety: all calls under the engine's progress lock. Aliasing: see Operation.
// Failure: advance() throws Mismatch; the caller fails the group.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collectives/runner.h"
#include "engine/lanes/slots.h"
#include "engine/progress/group.h"
#include "engine/progress/options.h"
#include "engine/progress/work.h"

namespace syncengine {

class Lane {
 public:
  using Trash = std::vector<std::shared_ptr<void>>;

  // What keeps an ended operation's memory alive goes to `trash`, to be dropped once the progress lock is free: a tensor's last
  // reference may take Python's lock.
  Lane(const Group& group, int id, Algorithm algorithm, std::function<bool()> stop, Trash& trash);
  virtual ~Lane() = default;

  static constexpr uint64_t kNoKey = ~uint64_t{0};
  struct Item {
    Operation operation;
    std::shared_ptr<Work> work;
    Clock::time_point since;
    uint64_t key = kNoKey;                    // announcement slot
    std::shared_ptr<const Slots> slots = {};  // that it is one of: held until the operation has ended
  };
  void enqueue(Item item) { queue_.push_back(std::move(item)); }
  // Enqueues a call of the program, and lets the peers know of it before it can open.
  void call(Item item);

  // Does what can be done without waiting, about `budget` bytes of it. True if anything moved.
  bool advance(size_t budget);

  // Members (bit per group rank) whose next step this rank needs: all of them, or one for each reason to wait.
  uint64_t missing(bool all) const;
  // Those that hold up the oldest chunk. Others may be missing only because they wait for the same ones.
  uint64_t blocking_ranks() const;
  // Members that have not made the call with this number.
  uint64_t not_called(uint64_t number) const { return behind(&shm::LaneProgress::called, number + 1, true); }
  const Item* oldest() const {
    return active_.empty() ? (queue_.empty() ? nullptr : &queue_.front()) : &active_.front().item;
  }
  // Adds this rank's memory that peers may still read or write.
  void add_direct_memory(std::vector<ArenaRange>& ranges) const;
  virtual void fail_all(const std::exception_ptr& error);
  uint64_t retired() const { return retired_; }  // operations that have ended

  struct Counters {
    uint64_t operations = 0, staged_bytes = 0, direct_bytes = 0, one_shot_bytes = 0;
    uint64_t interhost_bytes = 0;  // sent to other hosts
  };
  const Counters& counters() const { return counters_; }

 protected:  // hosts/interhost_lane.h puts hops between hosts in the place of the reduce phase
  struct Active {
    Item item;
    bool in_arena;          // all its spans, as published
    uint64_t verified = 0;  // peers whose record agreed
    bool path_known = false;
    Path path = Path::Staged;
    uint64_t chunks = 0;
    size_t chunk_bytes = 0;
    uint64_t end = 0;  // chunks of the lane up to and with this operation
    bool reduces = false, pulls = false, peers_read_user = false;
    std::vector<SpanList> spans;  // direct path: each rank's
  };
  struct Cursor {
    uint64_t operation = 0;  // of the lane
    uint64_t chunk = 0;      // of the operation
    uint64_t total = 0;      // of the lane
  };
  using Field = std::atomic<uint64_t> shm::LaneProgress::*;

  Active& at(uint64_t operation) { return active_[operation - retired_]; }
  const Active& at(uint64_t operation) const { return active_[operation - retired_]; }
  virtual bool open();
  uint64_t record_users(bool all) const;
  bool publish_spans(const Operation& operation, uint64_t number);
  SpanList spans_of(int member, uint64_t operation, const Operation& asked) const;
  bool choose_path(uint64_t operation, Active& active);
  virtual size_t cut(uint64_t operation, Active& active);  // settles the path; the bytes of a chunk, or 0: not yet
  bool find_peers_spans(uint64_t operation, Active& active);
  bool stage_one();
  virtual bool reduce_one();
  bool pull_one();
  bool retire();
  virtual bool verify(uint64_t operation, Active& active);
  size_t prepare(const Active& active, const Cursor& cursor);
  void point_bases(const Active& active, uint64_t chunk);  // `chunk` of the lane
  virtual void plan(const Chunk& chunk) { plan_chunk(chunk, plan_); }
  void step(Cursor& cursor, Field field, const char* point);

  shm::LaneProgress& own() const { return group_.block(group_.rank).lanes[id_].progress; }
  const shm::LaneProgress& peer(int rank) const { return group_.block(rank).lanes[id_].progress; }
  uint64_t behind(Field field, uint64_t count, bool all) const;
  bool is_behind(Field field, uint64_t count) const { return behind(field, count, false) != 0; }
  virtual uint64_t pull_blockers(bool all) const;

  const Group& group_;
  int id_;
  Algorithm algorithm_;
  std::function<bool()> stop_;
  Trash& trash_;
  Runner runner_;
  ChunkPlan plan_;
  Counters counters_;

  std::deque<Item> queue_;
  std::deque<Active> active_;  // operations retired_ .. opened_ - 1
  uint64_t retired_ = 0, opened_ = 0;
  Cursor staged_, reduced_, pulled_;
  size_t moved_bytes_ = 0;
  size_t slots_ = shm::kSlots, slot_bytes_ = shm::kSlotBytes;
  bool always_slots_ = false;  // a chunk takes a slot's turn on the direct path, too
};

}  // namespace syncengine
