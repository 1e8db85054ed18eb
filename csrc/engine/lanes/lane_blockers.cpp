// What each phase of a lane waits for: its steps ask before they go, sleepers for whom to wake up, errors for names.
#include "engine/lanes/lane.h"

namespace syncengine {

namespace {

constexpr auto kOpened = &shm::LaneProgress::opened, kStaged = &shm::LaneProgress::staged,
               kReduced = &shm::LaneProgress::reduced, kPulled = &shm::LaneProgress::pulled;

}  // namespace

Lane::Blockers Lane::retire_blockers(bool all) const {
  const LaneState& s = state_;
  if (s.pulled.operation == s.retired) return {};
  const Active& front = s.active.front();
  return front.peers_read_user ? s.behind(kPulled, front.end, all) : 0;
}

uint64_t Lane::compare_blockers(bool all) const { return state_.behind(kOpened, state_.retired + 1, all); }

Lane::Blockers Lane::pull_blockers(bool all) const {
  const LaneState& s = state_;
  if (s.pulled.total == s.reduced.total) return {};
  const Active& active = s.at(s.pulled.operation);
  if (exchange_) {
    uint64_t own = exchange_->uses_own_memory(s.pulled.total) ? uint64_t{1} << s.group.rank : 0;
    return s.behind(kReduced, s.pulled.total + 1, all) | own;
  }
  if (!active.pulls) return 0;
  // Broadcast waits for its root alone, everything else for everybody.
  const Operation& operation = active.item.operation;
  if (operation.collective != Collective::Broadcast) return s.behind(kReduced, s.pulled.total + 1, all);
  // acquire: the staged bytes
  bool late = s.progress_of(operation.root).reduced.load(std::memory_order_acquire) <= s.pulled.total;
  return late ? uint64_t{1} << operation.root : 0;
}

Lane::Blockers Lane::reduce_blockers(bool all) const {
  const LaneState& s = state_;
  if (s.reduced.total == s.staged.total) return {};
  return s.at(s.reduced.operation).reduces ? s.behind(kStaged, s.reduced.total + 1, all) : 0;
}

// A slot's last chunk must have been read by everybody, this rank included.
Lane::Blockers Lane::stage_blockers(bool all) const {
  const LaneState& s = state_;
  if (s.staged.operation == s.opened) return {};
  const Active& active = s.at(s.staged.operation);
  if (!active.path_known) return s.behind(kOpened, s.staged.operation + 1, all);
  bool takes_slot = active.path != Path::Direct || s.always_slots;
  if (!takes_slot || s.staged.total < s.slots) return 0;
  uint64_t needed = s.staged.total - s.slots + 1;
  if (s.pulled.total < needed) return {};
  return s.behind(kPulled, needed, all);
}

// A record is overwritten only after every rank has compared it with its own.
Lane::Blockers Lane::open_blockers(bool all) const {
  const LaneState& s = state_;
  if (queue_.empty() || s.active.size() == shm::kRecords) return {};
  return s.opened < shm::kRecords ? 0 : s.behind(&shm::LaneProgress::compared, s.opened - shm::kRecords + 1, all);
}

uint64_t Lane::missing(bool all) const {
  uint64_t members = open_blockers(all).value_or(0);
  if (state_.active.empty()) return members;
  members |= compare_blockers(all);
  for (auto blockers : {&Lane::retire_blockers, &Lane::pull_blockers, &Lane::reduce_blockers, &Lane::stage_blockers})
    members |= (this->*blockers)(all).value_or(0);
  return members;
}

uint64_t Lane::blocking_ranks() const {
  if (state_.active.empty()) return missing(true);
  if (auto members = retire_blockers(true)) return *members | compare_blockers(true);
  if (auto members = pull_blockers(true)) return *members;
  if (auto members = reduce_blockers(true)) return *members;
  return missing(true);
}

}  // namespace syncengine
