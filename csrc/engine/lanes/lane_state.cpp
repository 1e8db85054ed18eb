#include "engine/lanes/lane_state.h"

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

Checked<shm::OpRecord> LaneState::checked_record(int member, uint64_t operation) const {
  return check(copy_once(record(member, operation)), group.global_ranks[member]);
}

bool LaneState::compare_more(uint64_t operation, Active& active) {
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

}  // namespace syncengine
