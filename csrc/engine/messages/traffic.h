// A communicator's operations and messages under way: two lanes, the schedule, and the messenger that move them.
//
// Ownership: owns what it has taken over. Thread-safety: under the engine's progress lock. Failure: advance() throws
// errors after which it can't go on; the communicator fails, and ends it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "collectives/operation.h"
#include "collectives/order.h"
#include "engine/lanes/lane.h"
#include "engine/lanes/schedule.h"
#include "engine/messages/message_route.h"
#include "engine/messages/messenger.h"
#include "engine/progress/group.h"
#include "engine/progress/work.h"

namespace syncengine {

// Calls of the program that no pass has taken over yet.
//
// Thread-safety: any thread; its lock is held for moments only. Failure: once end() was called, all other calls throw
// its error.

class Submissions {
 public:
  struct Batch {
    std::vector<Lane::Item> operations;
    std::vector<Post> posts;
  };
  explicit Submissions(Work::Tally& tally) : tally_(tally) {}

  // Queues an operation that ranks match by the order of their calls.
  std::shared_ptr<Work> add(Operation operation) {
    std::lock_guard lock(mutex_);
    auto work = begin_work();
    work->place = {shm::kUserLane, calls_++, 0};
    batch_.operations.push_back({std::move(operation), work, Clock::now()});
    return work;
  }
  // Queues an operation that ranks match by `slot` and the number of a step.
  std::shared_ptr<Work> add(Operation operation, std::shared_ptr<const Slots> slots, uint64_t slot, uint64_t step) {
    std::lock_guard lock(mutex_);
    auto work = begin_work();
    work->place = {shm::kScheduledLane, slot, step};
    highest_step_ = std::max(highest_step_, step);
    batch_.operations.push_back({std::move(operation), work, Clock::now(), slot, std::move(slots)});
    return work;
  }
  // The highest number that any announcement has given to a step so far.
  uint64_t highest_step() const {
    std::lock_guard lock(mutex_);
    return highest_step_;
  }
  std::shared_ptr<Work> add(Message message, bool sends) {
    std::lock_guard lock(mutex_);
    auto work = begin_work();
    work->place = {shm::kMessages, 0, 0};
    Lane::Item item{.operation = {}, .work = work, .since = Clock::now()};
    item.operation.describe = message.describe;
    item.operation.keepalive = message.keepalive;
    batch_.posts.push_back({std::move(message), sends, std::move(item)});
    return work;
  }
  // Exchanges the collected calls for an empty batch, whose memory is used again.
  void swap(Batch& batch) {
    std::lock_guard lock(mutex_);
    std::swap(batch, batch_);
  }
  Batch end(std::exception_ptr error) {
    std::lock_guard lock(mutex_);
    error_ = std::move(error);
    return std::exchange(batch_, {});
  }
  void throw_if_ended() const {
    std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::shared_ptr<Work> begin_work() const {
    if (error_) std::rethrow_exception(error_);
    return std::make_shared<Work>(tally_);
  }

  Work::Tally& tally_;
  mutable std::mutex mutex_;  // guards the members below
  Batch batch_;
  std::exception_ptr error_;
  uint64_t calls_ = 0, highest_step_ = 0;
};

// The bits of a mask of members on this host, moved to the numbers that these members have elsewhere: bit i becomes bit
// `numbers[i]`.
inline uint64_t renumbered(uint64_t locals, const std::vector<int>& numbers) {
  uint64_t mask = 0;
  for (size_t i = 0; i < numbers.size(); ++i) mask |= (locals >> i & 1) << numbers[i];
  return mask;
}

class Traffic {
 public:
  // The parts that only a communicator over several hosts has, made by InterhostMembers::make_parts().
  struct Parts {
    Lane::MakeExchange exchange = {};
    std::function<std::unique_ptr<Schedule>(const Group& locals, Lane& lane)> schedule = {};
    std::unique_ptr<MessageRoute> route = {};
  };
  // All masks are of `locals`, the members on this host.
  Traffic(const Group& locals, const Placement& placement, const std::vector<int>& global_ranks, Algorithm algorithm,
          Lane::Trash& trash, Parts parts);

  void take(Submissions::Batch& calls);
  bool advance();  // true if anything moved
  void end(Submissions::Batch late, const std::exception_ptr& error);

  // The operation that has waited longest, and the members that hold it up.
  struct OldestOperation {
    const Lane::Item* item = nullptr;
    uint64_t blocking_ranks = 0;
  };
  OldestOperation oldest() const;
  uint64_t missing(bool all) const;
  uint64_t interest() const { return missing(false) | messenger_.interest(); }
  // Members that have not made this call. Empty for a message, since nobody can be certain that it will never come.
  uint64_t not_called(const Work::Place& place) const;
  std::vector<ArenaRange> direct_memory() const;
  std::map<std::string, uint64_t> counters() const;

  const Lane& lane(int id) const { return id == shm::kUserLane ? user_lane_ : scheduled_lane_; }
  const Schedule& schedule() const { return *schedule_; }
  Schedule& schedule() { return *schedule_; }
  const Messenger& messenger() const { return messenger_; }

 private:
  // About how many bytes a lane moves in a pass: limits how long a thread that wants the lock, or another lane, waits.
  static constexpr size_t kBudget = 1 << 20;

  Lane user_lane_, scheduled_lane_;
  std::unique_ptr<Schedule> schedule_;
  Messenger messenger_;
};

}  // namespace syncengine
