#include "engine/messages/traffic.h"

namespace syncengine {

Traffic::Traffic(const Group& locals, const Placement& placement, const std::vector<int>& global_ranks,
                 Algorithm algorithm, Lane::Trash& trash, Parts parts)
    : user_lane_(locals, shm::kUserLane, algorithm, trash, parts.exchange),
      scheduled_lane_(locals, shm::kScheduledLane, algorithm, trash, parts.exchange),
      schedule_(parts.schedule ? parts.schedule(locals, scheduled_lane_)
                               : std::make_unique<Schedule>(locals, scheduled_lane_)),
      messenger_(placement.rank, global_ranks, std::make_unique<MailboxRoute>(locals, placement.locals()),
                 std::move(parts.route), trash) {}

void Traffic::take(Submissions::Batch& calls) {
  for (Lane::Item& item : calls.operations) {
    if (item.key == Lane::kNoKey)
      user_lane_.call(std::move(item));
    else
      schedule_->announce(std::move(item));
  }
  calls.operations.clear();
  for (Post& post : calls.posts) messenger_.post(std::move(post));
  calls.posts.clear();
}

bool Traffic::advance() {
  bool moved = user_lane_.advance(kBudget);
  moved |= schedule_->advance();
  moved |= scheduled_lane_.advance(kBudget);
  schedule_->withdraw_refusals();
  moved |= messenger_.advance(kBudget);
  return moved;
}

void Traffic::end(Submissions::Batch late, const std::exception_ptr& error) {
  for (Post& post : late.posts) messenger_.post(std::move(post));
  for (Lane::Item& item : late.operations) user_lane_.enqueue(std::move(item));
  schedule_->fail_all();
  user_lane_.fail_all(error);
  scheduled_lane_.fail_all(error);
  messenger_.fail_all(error);
}

Traffic::OldestOperation Traffic::oldest() const {
  OldestOperation oldest;
  auto consider = [&](const auto& queue, const auto& steps) {
    const Lane::Item* item = queue.oldest();
    if (item && (!oldest.item || item->since < oldest.item->since)) oldest = {item, steps.blocking_ranks()};
  };
  consider(user_lane_, user_lane_.steps());
  consider(scheduled_lane_, scheduled_lane_.steps());
  consider(*schedule_, *schedule_);
  consider(messenger_, messenger_);
  return oldest;
}

uint64_t Traffic::missing(bool all) const {
  return user_lane_.steps().missing(all) | schedule_->missing(all) | scheduled_lane_.steps().missing(all) |
         messenger_.missing();
}

uint64_t Traffic::not_called(const Work::Place& place) const {
  if (place.lane == shm::kMessages) return 0;
  return place.lane == shm::kUserLane ? user_lane_.steps().not_called(place.number)
                                      : schedule_->late(place.number, place.epoch, true);
}

std::vector<ArenaRange> Traffic::direct_memory() const {
  std::vector<ArenaRange> offsets;
  user_lane_.add_direct_memory(offsets);
  scheduled_lane_.add_direct_memory(offsets);
  return offsets;
}

std::map<std::string, uint64_t> Traffic::counters() const {
  auto user = user_lane_.counters(), scheduled = scheduled_lane_.counters();
  return {{"operations", user.operations + scheduled.operations},
          {"staged_bytes", user.staged_bytes + scheduled.staged_bytes},
          {"direct_bytes", user.direct_bytes + scheduled.direct_bytes},
          {"one_shot_bytes", user.one_shot_bytes + scheduled.one_shot_bytes},
          {"messages", messenger_.messages()},
          {"interhost_bytes", user.interhost_bytes + scheduled.interhost_bytes + messenger_.interhost_bytes()}};
}

}  // namespace syncengine
