// Orders announced operations, which are gradient buckets that become ready in a different order on each rank, and
// drops those that some rank will not announce.
//
// Rank 0 of the group appends an operation to a log when all ranks have announced it; every rank runs the log in order.
// So no rank waits for one particular bucket, and no two ranks ever use one staging slot for different ones.
//
// Announced operations belong to steps of a model, which all members count alike (slots.h). A member that can't go on
// with a step stores the step's number as `refused`, after all of its announcements of that step, and announces nothing
// more of the step but its end. So once a member has refused, all that it will ever announce of the step is known.
// Operations that it has not announced never run, and each rank fails its own part of them by itself.
//
// The end of a refused step is an operation of its own, which good steps do not have. Every member announces the end as
// its last operation of the step, and begins no other step of the model before the end has run. So no slot holds the
// number of a later step while some member still waits for that slot in the refused one.
//
// Ownership: owns the announced operations until they are scheduled. Thread-safety: under the engine's progress lock.
// Failure: advance() throws Aborted if a member has refused a step of which this rank has the results.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/lanes/lane.h"

namespace syncengine {

// Whether a member has refused the step without having announced the operation, which then never runs. `refused` must
// have been read before `announced`, since the member stores `announced` first.
inline bool never_runs(uint64_t step, uint64_t refused, uint64_t announced) {
  return announced != step && refused == step;
}

// Whether this member, now in `step`, has passed over a step that another member has refused: both had the results of
// that step, and the other then failed. `ended` is the last step whose end this member has announced.
inline bool passed_over(uint64_t step, uint64_t ended, uint64_t refused) { return ended < refused && refused < step; }

class Schedule {
 public:
  Schedule(const Group& group, Lane& lane) : group_(group), lane_(lane) {}
  virtual ~Schedule() = default;

  // Queues the operation, and publishes that this rank has announced slot `item.key` in step `item.work->place.epoch`.
  void announce(Lane::Item item);
  // Publishes that this rank refuses the step, and why: it announces nothing more of this step but its end.
  virtual void refuse(const Slots& slots, uint64_t step, const std::string& text);
  // The member's reason for the last step that it has refused, or empty if that step has ended.
  std::string refusal_of(int member) const;
  // Returns the reason of a refused step, until that step's end has run: this rank's own reason if it has refused the
  // step, else that of a peer whose refusal has failed an operation here. Empty if there is no such step.
  std::string refusal_met() const;
  bool advance();
  // Lets members announce slots below `count`. Called before the first of them can have reserved such a slot.
  void expect_slots(uint64_t count) { expected_slots_ = std::max(expected_slots_, count); }
  uint64_t expected_slots() const { return expected_slots_; }
  // Forgets refusals whose steps have ended. Called when the lane has advanced.
  void withdraw_refusals();

  uint64_t missing(bool all) const;
  uint64_t blocking_ranks() const;  // for the oldest operation
  // Members that have not announced the slot in this step: all of them, or the first.
  uint64_t late(uint64_t slot, uint64_t step, bool all) const;
  const Lane::Item* oldest() const { return waiting_.empty() ? nullptr : &waiting_.front().item; }
  void fail_all();  // hands its operations to the lane, which the caller fails next

 protected:  // hosts/interhost_members.h agrees with other hosts before it appends
  struct AnnouncedOperation {
    Lane::Item item;
    uint64_t step;
    uint64_t ended;  // see passed_over()
    bool is_end() const { return item.key == item.slots->end_slot(); }
  };
  virtual bool append_ready();
  bool has_room() const;  // whether the log has room for another entry: its oldest may be unread
  // Whether other operations of the model still wait for their turn, so that it is not the end's turn yet.
  template <class HasTurn>
  bool has_more(const AnnouncedOperation& end, const HasTurn& has_turn) const {
    for (const AnnouncedOperation& other : waiting_)
      if (other.item.slots == end.item.slots && !other.is_end() && !has_turn(other)) return true;
    return false;
  }
  bool take_scheduled();

  // The number of steps that members have refused so far, added up over all members.
  virtual uint64_t refusals() const;
  // Returns why a member has refused the step without having announced the operation, or nothing if none has.
  virtual std::optional<std::string> reason_to_drop(const AnnouncedOperation& announced) const;
  // Whether a member has refused the operation's step, so that the operation never runs. `refused` and `theirs` are
  // that member's words: see never_runs(). Throws Aborted with `text` if passed_over() is true.
  static bool is_refused(const AnnouncedOperation& announced, uint64_t refused, uint64_t theirs,
                         const std::function<std::string()>& text);
  // Whether the end of this step has already been scheduled.
  bool has_ended(uint64_t first_slot, uint64_t step) const {
    auto known = ends_.find(first_slot);
    return known != ends_.end() && step <= known->second.taken;
  }

  const Group& group_;
  Lane& lane_;
  std::vector<AnnouncedOperation> waiting_;  // in the order of their announcement here
  uint64_t taken_ = 0;                       // log entries read

 private:
  std::string text_at(int member, uint64_t text_words) const;
  bool drop_refused();
  template <class TextOf>
  bool drop(const TextOf& text_of);
  void end_step(const AnnouncedOperation& end);

  struct StepEnd {
    uint64_t announced = 0, taken = 0;  // the last step whose end this rank has announced, or found in the log
  };
  std::map<uint64_t, StepEnd> ends_;  // by a model's first slot; only of models with a refused step
  // The operations that end refused steps, until they have run, each with the slots of its model.
  std::vector<std::pair<std::shared_ptr<const Slots>, std::shared_ptr<Work>>> ending_;
  std::map<uint64_t, std::string> met_;  // peers' reasons for such steps, by a model's first slot
  uint64_t judged_ = 0;                  // refusals that drop_refused() has looked at
  bool has_unjudged_ = false;            // operations announced since then
  uint64_t expected_slots_ = 0;
};

}  // namespace syncengine
