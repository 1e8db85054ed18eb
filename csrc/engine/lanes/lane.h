// A stream of operations that all ranks of a group run in the same order, chunk by chunk, each phase as far ahead as
// the peers allow: stage -> reduce -> pull. Operations of different lanes overtake each other. Operations of one lane
// pipeline, with one exception: an operation begins only when all earlier ones on the same memory have ended. So calls
// have the effect of their order.
//
// Ownership: a lane owns its queued operations. Thread-safety: all calls under the engine's progress lock. Aliasing:
// see Operation. Failure: advance() throws Mismatch; the caller fails the group.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "engine/lanes/lane_state.h"
#include "engine/progress/options.h"

namespace syncengine {

// Records in the trace that `item` was announced, or called by the program.
void trace_announced(const Group& group, const LaneState::Item& item);

class Lane {
 public:
  using Item = LaneState::Item;
  using Trash = std::vector<std::shared_ptr<void>>;
  static constexpr uint64_t kNoKey = LaneState::kNoKey;

  // References that keep an ended operation's memory alive go to `trash`, to be dropped once the progress lock is free:
  // a tensor's last reference may take Python's lock. `make_exchange` is for groups that reach over hosts.
  using MakeExchange = std::function<std::unique_ptr<Exchange>(LaneState& state)>;
  Lane(const Group& group, int id, Algorithm algorithm, Trash& trash, const MakeExchange& make_exchange = {});

  void enqueue(Item item);
  // Enqueues a call of the program, and lets the peers know of the call before it can open.
  void call(Item item);

  // Makes all steps that need no waiting, for about `budget` bytes. Returns whether anything moved.
  bool advance(size_t budget);

  const LaneSteps& steps() const { return steps_; }
  const Item* oldest() const {
    if (!state_.active.empty()) return &state_.active.front().item;
    return state_.queue.empty() ? nullptr : &state_.queue.front();
  }
  // Appends to `ranges` the parts of this rank's memory that peers may still read or write.
  void add_direct_memory(std::vector<ArenaRange>& ranges) const;
  void fail(Item item, const std::exception_ptr& error);  // `item` was not enqueued
  void fail_all(const std::exception_ptr& error);         // with an exchange: after its transfers were withdrawn
  uint64_t retired() const { return state_.retired; }     // operations that have ended
  const LaneState::Counters& counters() const { return state_.counters; }

 private:
  using Active = LaneState::Active;
  using Cursor = LaneState::Cursor;

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
  std::unique_ptr<Exchange> exchange_;
  const LaneSteps steps_{state_, exchange_.get()};
};

}  // namespace syncengine
