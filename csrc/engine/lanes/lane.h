// A stream of operations that all ranks of a group run in the same order, chunk by chunk, each phase as far ahead as
// the peers allow: stage -> reduce -> pull. Operations of different lanes overtake each other. Operations of one lane
// pipeline, with one exception: an operation on memory that an earlier operation works on begins when that one has
// ended. So calls have the effect of their order.
//
// Ownership: a lane owns its queued operations. Thread-safety: all calls under the engine's progress lock. Aliasing:
// see Operation. Failure: advance() throws Mismatch; the caller fails the group.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "engine/lanes/lane_state.h"
#include "engine/progress/options.h"

namespace syncengine {

// In the trace: `item` is announced, or called.
void trace_announced(const Group& group, const LaneState::Item& item);

class Lane {
 public:
  using Item = LaneState::Item;
  using Trash = std::vector<std::shared_ptr<void>>;
  static constexpr uint64_t kNoKey = LaneState::kNoKey;

  // References that keep an ended operation's memory alive go to `trash`, to be dropped once the progress lock is free:
  // a tensor's last reference may take Python's lock. `make_exchange`: if the group reaches over hosts.
  using MakeExchange = std::function<std::unique_ptr<Exchange>(LaneState& state)>;
  Lane(const Group& group, int id, Algorithm algorithm, Trash& trash, const MakeExchange& make_exchange = {});

  void enqueue(Item item);
  // Enqueues a call of the program, and lets the peers know of the call before it can open.
  void call(Item item);

  // Makes all steps that need no waiting, about `budget` bytes of them. True if anything moved.
  bool advance(size_t budget);

  // Members (bit per group rank) whose next step this rank needs: all such members, or one for each reason to wait.
  uint64_t missing(bool all) const;
  // Members that hold up the oldest chunk. Others may be missing only because they wait for the same members.
  uint64_t blocking_ranks() const;
  // Members that have not made the call with this number.
  uint64_t not_called(uint64_t number) const { return state_.behind(&shm::LaneProgress::called, number + 1, true); }
  const Item* oldest() const {
    return state_.active.empty() ? (queue_.empty() ? nullptr : &queue_.front()) : &state_.active.front().item;
  }
  // Adds the ranges of this rank's memory that peers may still read or write.
  void add_direct_memory(std::vector<ArenaRange>& ranges) const;
  void fail(Item item, const std::exception_ptr& error);  // `item` was not enqueued
  void fail_all(const std::exception_ptr& error);         // with an exchange: after its transfers were withdrawn
  uint64_t retired() const { return state_.retired; }     // operations that have ended
  const LaneState::Counters& counters() const { return state_.counters; }

 private:
  using Active = LaneState::Active;
  using Cursor = LaneState::Cursor;
  // Whether a phase has a next step that this rank itself is ready for.
  bool has_retire() const { return state_.pulled.operation != state_.retired; }
  bool has_pull() const { return state_.pulled.total != state_.reduced.total; }
  bool has_reduce() const { return state_.reduced.total != state_.staged.total; }
  bool has_stage() const { return state_.staged.operation != state_.opened && has_slot(); }
  bool has_open() const {
    return !queue_.empty() && state_.active.size() != shm::kRecords && state_.retired >= opens_after_;
  }
  bool has_slot() const;  // for the next chunk, as far as is known
  // And the members that this step waits for, all or one: without any, the step may be made. The own bit: envelopes
  // still leave this rank's memory.
  uint64_t retire_blockers(bool all) const;
  uint64_t pull_blockers(bool all) const;
  uint64_t reduce_blockers(bool all) const;
  uint64_t stage_blockers(bool all) const;
  uint64_t open_blockers(bool all) const;
  uint64_t compare_blockers(bool all) const;  // of the oldest operation

  void await_memory();
  bool open();
  bool stage_one();
  bool reduce_one();
  bool pull_one();
  bool retire();
  int64_t publish_spans(const Operation& operation, uint64_t number);
  SpanList spans_of(int member, uint64_t operation, const Operation& asked) const;
  bool choose_path(uint64_t operation, Active& active);
  bool find_peers_spans(uint64_t operation, Active& active);
  bool compare(uint64_t operation, Active& active) {
    return exchange_ ? exchange_->compare(operation, active) : state_.compare(operation, active);
  }
  size_t prepare(const Active& active, const Cursor& cursor);
  void step(Cursor& cursor, LaneState::Field field, const char* point);

  LaneState state_;
  Algorithm algorithm_;
  Trash& trash_;
  ChunkPlan plan_;
  std::deque<Item> queue_;
  uint64_t opens_after_ = 0;  // operations that must have ended before the next opens: one works on its memory
  std::unique_ptr<Exchange> exchange_;
};

}  // namespace syncengine
