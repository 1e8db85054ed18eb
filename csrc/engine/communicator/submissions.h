// Calls of the program that no pass has taken over yet.
//
// Thread-safety: any thread; its lock is held for moments only. Failure: after end() the others throw what ended it.
#pragma once

#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "engine/messages/message_route.h"

namespace syncengine {

class Submissions {
 public:
  struct Batch {
    std::vector<Lane::Item> operations;
    std::vector<Post> posts;
  };
  explicit Submissions(Work::Tally& tally) : tally_(tally) {}

  // Without `slots` it is matched by the order of the calls.
  std::shared_ptr<Work> add(Operation operation, std::shared_ptr<const Slots> slots, size_t index) {
    const uint64_t slot = slots ? slots->first() + index : Lane::kNoKey;
    std::lock_guard lock(mutex_);
    auto work = begin_work();
    work->place =
        !slots ? Work::Place{shm::kUserLane, calls_++, 0} : Work::Place{shm::kScheduledLane, slot, ++announced_[slot]};
    batch_.operations.push_back({std::move(operation), work, Clock::now(), slot, std::move(slots)});
    return work;
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
  uint64_t calls_ = 0;
  std::map<uint64_t, uint64_t> announced_;  // count per slot
};

}  // namespace syncengine
