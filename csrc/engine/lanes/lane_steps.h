// The conditions of each phase's next step: for the steps themselves, for sleepers that must know who can wake them,
// and for errors that name ranks.
//
// Ownership: a view of the lane's state, and of its exchange. Thread-safety: under the engine's progress lock. Failure:
// none.
#pragma once

#include <cstdint>

#include "engine/lanes/lane_state.h"

namespace syncengine {

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
  bool has_slot() const;  // for the next chunk, as far as this rank knows

  // The members (one bit per group rank) for whom that step waits, all of them or one; none if the step may be made.
  // This rank's own bit means that envelopes still leave its memory.
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
