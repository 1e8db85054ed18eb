#include "engine/lanes/lane_state.h"

#include "engine/lanes/mismatch.h"

namespace syncengine {

uint64_t LaneState::behind(Field field, uint64_t count, bool all) const {
  uint64_t members = 0;
  for (int member = 0; member < group.size; ++member) {
    if (member == group.rank) continue;
    // acquire: all that the peer stored before this count
    if ((progress_of(member).*field).load(std::memory_order_acquire) >= count) continue;
    members |= uint64_t{1} << member;
    if (!all) break;
  }
  return members;
}

Checked<shm::OpRecord> LaneState::checked_record(int member, uint64_t operation) const {
  return check(copy_once(record(member, operation)), group.global_ranks[member]);
}

bool LaneState::compare(uint64_t operation, Active& active) {
  if (active.verified == peers) return true;
  const Operation& asked = active.item.operation;
  for (int member = 0; member < group.size; ++member) {
    uint64_t bit = uint64_t{1} << member;
    if (member == group.rank || active.verified & bit) continue;
    if (progress_of(member).opened.load(std::memory_order_acquire) <= operation) continue;  // acquire: the record
    require_same(group.global_ranks[group.rank], checked_record(group.rank, operation), group.global_ranks[member],
                 checked_record(member, operation), asked);
    active.verified |= bit;
    const uint64_t* flags = group.block(member).lanes[id].flags[operation % shm::kRecords];
    for (size_t i = 0; i < asked.flag_words; ++i) asked.flags[i] |= load_once(flags[i]);
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

uint64_t LaneSteps::retire_blockers(bool all) const {
  const LaneState::Active& front = state.active.front();
  return front.peers_read_user ? state.behind(&shm::LaneProgress::pulled, front.end, all) : 0;
}

uint64_t LaneSteps::compare_blockers(bool all) const {
  return state.behind(&shm::LaneProgress::opened, state.retired + 1, all);
}

uint64_t LaneSteps::pull_blockers(bool all) const {
  const LaneState::Active& active = state.at(state.pulled.operation);
  const Operation& operation = active.item.operation;
  if (!exchange && !active.pulls) return 0;
  // Within a host, a broadcast waits for its root alone; other operations wait for all members.
  if (!exchange && operation.collective == Collective::Broadcast) {
    // acquire: the staged bytes
    uint64_t late = state.progress_of(operation.root).reduced.load(std::memory_order_acquire) <= state.pulled.total;
    return late << operation.root;
  }
  uint64_t own = exchange && exchange->uses_own_memory(state.pulled.total);
  return state.behind(&shm::LaneProgress::reduced, state.pulled.total + 1, all) | own << state.group.rank;
}

uint64_t LaneSteps::reduce_blockers(bool all) const {
  if (!state.at(state.reduced.operation).reduces) return 0;
  return state.behind(&shm::LaneProgress::staged, state.reduced.total + 1, all);
}

// Members that hold up staging: they have not opened the operation, or not read what the next chunk's slot holds.
uint64_t LaneSteps::stage_blockers(bool all) const {
  const LaneState::Active& active = state.at(state.staged.operation);
  if (!active.path_known) return state.behind(&shm::LaneProgress::opened, state.staged.operation + 1, all);
  if (!state.takes_slot(active) || state.staged.total < state.slots) return 0;
  return state.behind(&shm::LaneProgress::pulled, state.staged.total - state.slots + 1, all);
}

// A record may be overwritten only when every rank has compared it with its own.
uint64_t LaneSteps::open_blockers(bool all) const {
  if (state.opened < shm::kRecords) return 0;
  return state.behind(&shm::LaneProgress::compared, state.opened - shm::kRecords + 1, all);
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
