#include "engine/lanes/lane_state.h"

#include "engine/lanes/lane.h"
#include "engine/lanes/mismatch.h"

namespace syncengine {

uint64_t LaneState::behind(Field field, uint64_t count, bool all) const {
  uint64_t members = 0;
  for (int member = 0; member < group.size; ++member) {
    if (member == group.rank) continue;
    // acquire: the bytes behind the count
    if ((progress_of(member).*field).load(std::memory_order_acquire) >= count) continue;
    members |= uint64_t{1} << member;
    if (!all) break;
  }
  return members;
}

bool LaneState::compare_more(uint64_t operation, Active& active) {
  const shm::OpRecord& mine = record(group.rank, operation);
  for (int member = 0; member < group.size; ++member) {
    uint64_t bit = uint64_t{1} << member;
    if (member == group.rank || active.verified & bit) continue;
    if (progress_of(member).opened.load(std::memory_order_acquire) <= operation) continue;  // acquire: the record
    require_same(group.global_ranks[group.rank], mine, group.global_ranks[member], record(member, operation),
                 active.item.operation);
    active.verified |= bit;
    const uint64_t* flags = group.block(member).lanes[id].flags[operation % shm::kRecords];
    for (size_t i = 0; i < mine.flag_words; ++i) active.item.operation.flags[i] |= flags[i];
  }
  return active.verified == peers;
}

void LaneState::point_bases(const Active& active, uint64_t chunk) {
  for (int member = 0; member < group.size; ++member) {
    runner.bases()[member] =
        active.path == Path::Direct
            ? Runner::Base{.spans = &active.spans[member]}
            : Runner::Base{.slot = group.block(member).staging[id][0] + chunk % slots * slot_bytes};
  }
}

// What each phase of a lane waits for: its steps ask before they go, sleepers for whom to wake up, errors for names.

namespace {

constexpr auto kOpened = &shm::LaneProgress::opened, kStaged = &shm::LaneProgress::staged,
               kReduced = &shm::LaneProgress::reduced, kPulled = &shm::LaneProgress::pulled;

}  // namespace

uint64_t Lane::retire_blockers(bool all) const {
  const LaneState& s = state_;
  const Active& front = s.active.front();
  return front.peers_read_user ? s.behind(kPulled, front.end, all) : 0;
}

uint64_t Lane::compare_blockers(bool all) const { return state_.behind(kOpened, state_.retired + 1, all); }

uint64_t Lane::pull_blockers(bool all) const {
  const LaneState& s = state_;
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

uint64_t Lane::reduce_blockers(bool all) const {
  const LaneState& s = state_;
  return s.at(s.reduced.operation).reduces ? s.behind(kStaged, s.reduced.total + 1, all) : 0;
}

// A slot's last chunk must have been read by everybody: this rank, and
bool Lane::has_slot() const {
  const LaneState& s = state_;
  return s.pulled.total + s.slots > s.staged.total || !s.takes_slot(s.at(s.staged.operation));
}

// its peers.
uint64_t Lane::stage_blockers(bool all) const {
  const LaneState& s = state_;
  const Active& active = s.at(s.staged.operation);
  if (!active.path_known) return s.behind(kOpened, s.staged.operation + 1, all);
  if (!s.takes_slot(active) || s.staged.total < s.slots) return 0;
  return s.behind(kPulled, s.staged.total - s.slots + 1, all);
}

// A record is overwritten only after every rank has compared it with its own.
uint64_t Lane::open_blockers(bool all) const {
  const LaneState& s = state_;
  return s.opened < shm::kRecords ? 0 : s.behind(&shm::LaneProgress::compared, s.opened - shm::kRecords + 1, all);
}

uint64_t Lane::missing(bool all) const {
  uint64_t members = has_open() ? open_blockers(all) : 0;
  if (state_.active.empty()) return members;
  members |= compare_blockers(all);
  if (has_retire()) members |= retire_blockers(all);
  if (has_pull()) members |= pull_blockers(all);
  if (has_reduce()) members |= reduce_blockers(all);
  if (has_stage()) members |= stage_blockers(all);
  return members;
}

uint64_t Lane::blocking_ranks() const {
  if (state_.active.empty()) return missing(true);
  if (has_retire()) return retire_blockers(true) | compare_blockers(true);
  if (has_pull()) return pull_blockers(true);
  if (has_reduce()) return reduce_blockers(true);
  return missing(true);
}

}  // namespace syncengine
