#include "engine/lanes/lane_steps.h"

namespace syncengine {

namespace {

constexpr auto kOpened = &shm::LaneProgress::opened, kStaged = &shm::LaneProgress::staged,
               kReduced = &shm::LaneProgress::reduced, kPulled = &shm::LaneProgress::pulled;

}  // namespace

uint64_t LaneSteps::retire_blockers(bool all) const {
  const LaneState::Active& front = state.active.front();
  return front.peers_read_user ? state.behind(kPulled, front.end, all) : 0;
}

uint64_t LaneSteps::compare_blockers(bool all) const { return state.behind(kOpened, state.retired + 1, all); }

uint64_t LaneSteps::pull_blockers(bool all) const {
  const LaneState::Active& active = state.at(state.pulled.operation);
  if (exchange) {
    uint64_t own = exchange->uses_own_memory(state.pulled.total) ? uint64_t{1} << state.group.rank : 0;
    return state.behind(kReduced, state.pulled.total + 1, all) | own;
  }
  if (!active.pulls) return 0;
  // A broadcast waits for its root alone; other operations wait for all members.
  const Operation& operation = active.item.operation;
  if (operation.collective != Collective::Broadcast) return state.behind(kReduced, state.pulled.total + 1, all);
  // acquire: the staged bytes
  bool late = state.progress_of(operation.root).reduced.load(std::memory_order_acquire) <= state.pulled.total;
  return late ? uint64_t{1} << operation.root : 0;
}

uint64_t LaneSteps::reduce_blockers(bool all) const {
  return state.at(state.reduced.operation).reduces ? state.behind(kStaged, state.reduced.total + 1, all) : 0;
}

// Whether this rank has read the last chunk of the slot that the next chunk takes.
bool LaneSteps::has_slot() const {
  return state.pulled.total + state.slots > state.staged.total || !state.takes_slot(state.at(state.staged.operation));
}

// Members that have not opened the operation, or not read the last chunk of the slot that the next chunk takes.
uint64_t LaneSteps::stage_blockers(bool all) const {
  const LaneState::Active& active = state.at(state.staged.operation);
  if (!active.path_known) return state.behind(kOpened, state.staged.operation + 1, all);
  if (!state.takes_slot(active) || state.staged.total < state.slots) return 0;
  return state.behind(kPulled, state.staged.total - state.slots + 1, all);
}

// A record may be overwritten only when every rank has compared it with its own.
uint64_t LaneSteps::open_blockers(bool all) const {
  return state.opened < shm::kRecords
             ? 0
             : state.behind(&shm::LaneProgress::compared, state.opened - shm::kRecords + 1, all);
}

uint64_t LaneSteps::missing(bool all) const {
  uint64_t members = has_open() ? open_blockers(all) : 0;
  if (state.active.empty()) return members;
  members |= compare_blockers(all);
  if (has_retire()) members |= retire_blockers(all);
  if (has_pull()) members |= pull_blockers(all);
  if (has_reduce()) members |= reduce_blockers(all);
  if (has_stage()) members |= stage_blockers(all);
  return members;
}

uint64_t LaneSteps::blocking_ranks() const {
  if (state.active.empty()) return missing(true);
  if (has_retire()) return retire_blockers(true) | compare_blockers(true);
  if (has_pull()) return pull_blockers(true);
  if (has_reduce()) return reduce_blockers(true);
  return missing(true);
}

}  // namespace syncengine
