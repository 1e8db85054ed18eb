#include "engine/hosts/interhost_schedule.h"

#include "base/error.h"
#include "base/sync_point.h"

namespace syncengine::hosts {

void InterhostSchedule::hear(int member, const Ready& ready) {
  if (!links_.leads_job() || links_.leader(links_.placement.host_of[member]) != member)
    throw Error(ErrorKind::PeerLost, links_.name(member) + " announced a bucket to the wrong rank");
  ready_[ready.slot][member] = ready.epoch;
}

void InterhostSchedule::hear(int member, const Scheduled& scheduled) {
  if (!links_.leads_host() || member != 0)
    throw Error(ErrorKind::PeerLost, links_.name(member) + " scheduled a bucket out of turn");
  next_.push_back(scheduled.slot);
}

bool InterhostSchedule::append_ready() {
  bool moved = report();
  if (links_.leads_job()) moved |= order();
  shm::Schedule& log = group_.own().schedule;
  for (; !next_.empty() && has_room(); next_.pop_front(), moved = true) {
    uint64_t length = log.length.load(std::memory_order_relaxed);  // relaxed: its only writer
    log.slots[length % shm::kLogEntries] = next_.front();
    log.length.store(length + 1, std::memory_order_release);  // release: the entry
    sync_point("scheduled");
  }
  return moved;
}

bool InterhostSchedule::report() {
  bool moved = false;
  for (const Announced& waiting : waiting_) {
    uint64_t& reported = reported_[waiting.item.key];
    if (reported >= waiting.epoch || late(waiting.item.key, waiting.epoch, false)) continue;
    reported = waiting.epoch;
    moved = true;
    if (links_.leads_job())
      ready_[waiting.item.key][0] = waiting.epoch;
    else
      links_.tell(0, Ready{.head = {}, .slot = waiting.item.key, .epoch = waiting.epoch});
  }
  return moved;
}

bool InterhostSchedule::order() {
  bool moved = false;
  for (const Announced& waiting : waiting_) {
    uint64_t slot = waiting.item.key;
    uint64_t& ordered = ordered_[slot];
    if (ordered >= waiting.epoch) continue;
    if (unready(waiting)) continue;
    ordered = waiting.epoch;
    moved = true;
    next_.push_back(slot);
    for (int host = 1; host < links_.placement.hosts(); ++host)
      links_.tell(links_.leader(host), Scheduled{.head = {}, .slot = slot});
  }
  return moved;
}

uint64_t InterhostSchedule::unready(const Announced& waiting) const {
  uint64_t members = 0;
  auto found = ready_.find(waiting.item.key);
  for (int host = 0; host < links_.placement.hosts(); ++host) {
    int leader = links_.leader(host);
    bool ready = found != ready_.end() && found->second.contains(leader) && found->second.at(leader) >= waiting.epoch;
    if (!ready) members |= uint64_t{1} << leader;
  }
  return members;
}

uint64_t InterhostSchedule::remote_blocking_ranks() const {
  if (waiting_.empty() || late(waiting_.front().item.key, waiting_.front().epoch, false)) return 0;
  if (!links_.leads_job()) return links_.leads_host() ? 1 : 0;
  return unready(waiting_.front()) & ~uint64_t{1};
}

}  // namespace syncengine::hosts
