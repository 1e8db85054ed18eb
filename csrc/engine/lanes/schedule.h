// The order of announced operations: gradient buckets, which become ready in another order on each rank.
//
// Rank 0 of the group appends an operation to a log when all ranks have announced it; every rank runs the log in order.
// So nothing waits for one bucket, and no two ranks ever hold staging memory for different ones.
//
// Ownership: owns the announced operations until they are scheduled. Thread-safety: under the engine's progress lock.
#pragma once

#include <vector>

#include "engine/lanes/lane.h"

namespace syncengine {

class Schedule {
 public:
  Schedule(const Group& group, Lane& lane) : group_(group), lane_(lane) {}
  virtual ~Schedule() = default;

  // Publishes that this rank is ready for `item.key`. Returns the count of announcements of that slot.
  uint64_t announce(Lane::Item item);
  bool advance();

  uint64_t missing(bool all) const;
  uint64_t blocking_ranks() const;                              // of the oldest
  uint64_t not_announced(uint64_t slot, uint64_t epoch) const;  // members
  const Lane::Item* oldest() const { return waiting_.empty() ? nullptr : &waiting_.front().item; }
  void fail_all();  // hands its operations to the lane, which must fail them next

 protected:  // hosts/interhost_schedule.h agrees with other hosts before it appends
  struct Announced {
    Lane::Item item;
    uint64_t epoch;
  };
  // Members that have not announced it yet: all of them, or the first.
  uint64_t late(uint64_t slot, uint64_t epoch, bool all) const;
  virtual bool append_ready();
  bool has_room() const;  // for another entry: the oldest may be unread
  bool take_scheduled();

  const Group& group_;
  Lane& lane_;
  std::vector<Announced> waiting_;  // in the order of their announcement here
  uint64_t taken_ = 0;              // log entries read
};

}  // namespace syncengine
