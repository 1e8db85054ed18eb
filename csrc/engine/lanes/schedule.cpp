
#include "engine/lanes/schedule.h"

#include <algorithm>

#include "base/error.h"
#include "base/sync_point.h"
#include "base/trace.h"
#include "engine/lanes/slots.h"

namespace syncengine {

uint64_t Schedule::announce(Lane::Item item) {
  auto& count = group_.own().announced[item.key];
  uint64_t epoch = count.load(std::memory_order_relaxed) + 1;  // relaxed: this rank is its only writer
  if (trace::is_on()) trace_announced(group_, item);
  waiting_.push_back({std::move(item), epoch});
  count.store(epoch, std::memory_order_release);
  sync_point("announced");
  return epoch;
}

bool Schedule::advance() {
  bool moved = group_.rank == 0 && append_ready();
  return take_scheduled() || moved;
}

uint64_t Schedule::not_announced(uint64_t slot, uint64_t epoch) const { return late(slot, epoch, true); }

uint64_t Schedule::late(uint64_t slot, uint64_t epoch, bool all) const {
  uint64_t members = 0;
  for (int member = 0; member < group_.size; ++member) {
    if (group_.block(member).announced[slot].load(std::memory_order_acquire) >= epoch) continue;
    members |= uint64_t{1} << member;
    if (!all) break;
  }
  return members;
}

bool Schedule::has_room() const {
  uint64_t length = group_.own().schedule.length.load(std::memory_order_relaxed);  // relaxed: its only writer
  for (int member = 0; member < group_.size; ++member) {
    uint64_t opened = group_.block(member).lanes[shm::kScheduledLane].progress.opened.load(std::memory_order_acquire);
    if (length - opened >= shm::kLogEntries) return false;
  }
  return true;
}

bool Schedule::append_ready() {
  shm::Schedule& log = group_.own().schedule;
  uint64_t length = log.length.load(std::memory_order_relaxed);  // relaxed: its only writer
  uint64_t before = length;
  // Entries from taken_ on are this rank's own waiting operations that it has logged already.
  for (size_t i = length - taken_; i < waiting_.size(); ++i) {
    if (late(waiting_[i].item.key, waiting_[i].epoch, false)) continue;
    if (!has_room()) return length > before;
    log.slots[length % shm::kLogEntries] = waiting_[i].item.key;
    std::rotate(waiting_.begin() + static_cast<long>(length - taken_), waiting_.begin() + static_cast<long>(i),
                waiting_.begin() + static_cast<long>(i) + 1);
    log.length.store(++length, std::memory_order_release);  // release: the entry
    sync_point("scheduled");
  }
  return length > before;
}

bool Schedule::take_scheduled() {
  const shm::Schedule& log = group_.block(0).schedule;
  uint64_t length = log.length.load(std::memory_order_acquire);  // acquire: the entries
  bool moved = taken_ < length;
  for (; taken_ < length; ++taken_) {
    uint64_t key = log.slots[taken_ % shm::kLogEntries];
    auto found = std::find_if(waiting_.begin(), waiting_.end(), [&](const Announced& a) { return a.item.key == key; });
    if (found == waiting_.end())
      throw Error(ErrorKind::Mismatch, group_.name(0) + " scheduled a bucket that " + group_.name(group_.rank) +
                                           " has not announced: the ranks' models differ");
    if (trace::is_on()) {
      const int64_t now = trace::now();
      trace::record({.kind = trace::Kind::Scheduled,
                     .begin = now,
                     .end = now,
                     .group = group_.id,
                     .lane = shm::kScheduledLane,
                     .place = key,
                     .epoch = found->epoch});
    }
    lane_.enqueue(std::move(found->item));
    waiting_.erase(found);
  }
  return moved;
}

uint64_t Schedule::missing(bool all) const {
  uint64_t members = 0;
  for (const Announced& announced : waiting_) {
    uint64_t others = late(announced.item.key, announced.epoch, all || group_.rank == 0);
    // Only rank 0 acts on the others' announcements; everybody else sleeps until rank 0 does.
    if (group_.rank == 0)
      members |= all ? others : others & -others;
    else
      members |= all && others ? others : 1;
  }
  return members;
}

uint64_t Schedule::blocking_ranks() const {
  if (waiting_.empty()) return 0;
  uint64_t members = late(waiting_.front().item.key, waiting_.front().epoch, true);
  return members || group_.rank == 0 ? members : 1;
}

void Schedule::fail_all() {
  for (Announced& announced : waiting_) lane_.enqueue(std::move(announced.item));
  waiting_.clear();
}

Slots::~Slots() { table_->give_back(first_); }

uint64_t SlotTable::gap(uint64_t from, size_t count) const {
  std::lock_guard lock(mutex_);
  auto next = held_.upper_bound(from);
  if (next != held_.begin()) --next;
  for (; next != held_.end() && next->first < from + count; ++next) {
    if (next->second > from) from = next->second;
  }
  return count <= size_ && from <= size_ - count ? from : size_;
}

std::shared_ptr<const Slots> SlotTable::take(uint64_t first, size_t count) {
  if (first == size_ || gap(first, count) != first) return nullptr;
  std::lock_guard lock(mutex_);
  held_.emplace(first, first + count);
  return std::make_shared<const Slots>(shared_from_this(), first);
}

void SlotTable::give_back(uint64_t first) {
  std::lock_guard lock(mutex_);
  held_.erase(first);
}

}  // namespace syncengine
