// A communicator's operations and messages on their way, and what moves them.
//
// Ownership: owns what it has taken over. Thread-safety: under the engine's progress lock. Failure: advance() throws
// what can't go on; the communicator fails, and ends it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "collectives/order.h"
#include "engine/communicator/communicator.h"
#include "engine/communicator/succession.h"
#include "engine/lanes/lane.h"
#include "engine/lanes/lane_state.h"
#include "engine/lanes/schedule.h"
#include "engine/messages/message_route.h"
#include "engine/messages/messenger.h"
#include "engine/progress/driver.h"
#include "engine/progress/group.h"
#include "transport/interhost.h"

namespace syncengine {

// Calls of the program that no pass has taken over yet.
//
// Thread-safety: any thread; its lock is held for moments only. Failure: after end() the others throw what ended it.

class Submissions {
 public:
  struct Batch {
    std::vector<Lane::Item> operations;
    std::vector<Post> posts;
  };
  explicit Submissions(Work::Tally& tally) : tally_(tally) {}

  // Matched by the order of the calls.
  std::shared_ptr<Work> add(Operation operation) {
    std::lock_guard lock(mutex_);
    auto work = begin_work();
    work->place = {shm::kUserLane, calls_++, 0};
    batch_.operations.push_back({std::move(operation), work, Clock::now()});
    return work;
  }
  // Matched by `slot` and the number of a step.
  std::shared_ptr<Work> add(Operation operation, std::shared_ptr<const Slots> slots, uint64_t slot, uint64_t step) {
    std::lock_guard lock(mutex_);
    auto work = begin_work();
    work->place = {shm::kScheduledLane, slot, step};
    highest_step_ = std::max(highest_step_, step);
    batch_.operations.push_back({std::move(operation), work, Clock::now(), slot, std::move(slots)});
    return work;
  }
  // Of any step, so far.
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
  // Gives what there is for an empty one, whose memory is used again.
  void swap(Batch& batch) {
    std::lock_guard lock(mutex_);
    batch.operations.swap(batch_.operations);
    batch.posts.swap(batch_.posts);
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
  mutable std::mutex mutex_;  // guards the rest
  Batch batch_;
  std::exception_ptr error_;
  uint64_t calls_ = 0, highest_step_ = 0;
};

// What a communicator asks of its part between hosts, which it has if its members are on several: the traffic with
// those elsewhere, what they tell, and how they end. hosts/interhost_members.h is one.
//
// Ownership: the communicator's, whose Traffic refers to it and ends first. Thread-safety: under the engine's progress
// lock, but where it says otherwise.

class Traffic;

class InterhostPart {
 public:
  virtual ~InterhostPart() = default;

  // Traffic's, of which each is made once; it owns them.
  virtual std::unique_ptr<Exchange> make_exchange(LaneState& lane) = 0;
  virtual std::unique_ptr<Schedule> make_schedule(const Group& locals, Lane& lane) = 0;
  virtual std::unique_ptr<MessageRoute> make_route() = 0;

  // Begins to hear the others, when there is the traffic. `fail` ends the communicator, without a look at what else
  // came.
  virtual void enroll(std::function<void(const Error&)> fail) = 0;
  virtual void hear_all() = 0;
  // What the communicator must fail with; tells the others for whom it waits.
  virtual std::optional<Error> check(const Traffic& traffic) = 0;
  // Tells the others. Nothing that comes from another host touches this rank's memory after it; all that is still heard
  // is what look_around() asks for, until forget().
  virtual void end(shm::Standing standing, const Error& for_peers, const Traffic& traffic) = 0;
  virtual void forget() = 0;
  // Of shrink(): tells the others `sees.own`, if it is new, and adds what they have told, and who of them is gone.
  virtual void look_around(Outlook& sees) = 0;

  virtual bool have_all_left() const = 0;
  // Members, here and elsewhere, that hold up what waits longest.
  virtual uint64_t blocking_ranks(const Traffic& traffic) const = 0;

  // Without any lock.
  virtual IoLoop* io_loop() const = 0;
  virtual Interhost& interhost() const = 0;
  virtual const std::vector<int>& job_ranks() const = 0;  // of the members

  // Without the lock, which they take. measure() is collective over `communicator`, its own, and blocks.
  virtual void measure(Communicator& communicator, const std::function<void()>& interrupted) = 0;
  virtual std::string describe_links() const = 0;
  // Of split(): the number of a communicator that this rank, its first member, founds.
  virtual uint64_t take_number() = 0;
  // Of shrink(): that of the one communicator that may follow, the same on all members. Throws InvalidUsage if none
  // may.
  virtual uint64_t number_of_next() const = 0;
  // Kept until there is the new communicator: who was quicker may use it already.
  virtual std::shared_ptr<void> expect_group() const = 0;
  // For a new communicator of these `members`, who are on several hosts. Without any lock. Throws InvalidUsage if its
  // founder had no `number` left.
  virtual std::unique_ptr<InterhostPart> split(uint64_t number, const Placement& placement,
                                               const std::vector<int>& members,
                                               std::vector<int> global_ranks) const = 0;
};

class Traffic {
 public:
  // Masks are of `locals`, the members on this host. `interhost`: null on one host.
  Traffic(const Group& locals, const Placement& placement, const std::vector<int>& global_ranks, Algorithm algorithm,
          Lane::Trash& trash, InterhostPart* interhost);

  void take(Submissions::Batch& calls);
  bool advance();  // true if anything moved
  void end(Submissions::Batch late, const std::exception_ptr& error);

  // The operation that waits longest, and the members that hold it up.
  struct Pending {
    const Lane::Item* item = nullptr;
    uint64_t blocking_ranks = 0;
  };
  Pending oldest() const;
  uint64_t missing(bool all) const;
  uint64_t interest() const { return missing(false) | messenger_.interest(); }
  // Members that have not made this call. Of a message none: it can't be seen for certain that it will never come.
  uint64_t not_called(const Work::Place& place) const;
  std::vector<ArenaRange> direct_memory() const;
  std::map<std::string, uint64_t> counters() const;

  const Lane& lane(int id) const { return id == shm::kUserLane ? user_lane_ : scheduled_lane_; }
  const Schedule& schedule() const { return *schedule_; }
  Schedule& schedule() { return *schedule_; }
  const Messenger& messenger() const { return messenger_; }
  Messenger& messenger() { return messenger_; }

 private:
  Lane user_lane_, scheduled_lane_;
  std::unique_ptr<Schedule> schedule_;
  Messenger messenger_;
};

}  // namespace syncengine
