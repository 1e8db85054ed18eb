// What a communicator does about every 50 ms while something waits: deaths, departures and deadlines. These are the
// parts of EngineCommunicator that turn a wait that can't end into a named error.
#include <algorithm>

#include "base/texts.h"
#include "engine/communicator/engine_communicator.h"
#include "engine/lanes/mismatch.h"

namespace syncengine {

std::vector<int> EngineCommunicator::dead() {
  engine_->throw_if_forked();
  return engine_->locked([&] {
    std::vector<int> members;
    for (int member = 0; member < group_.size; ++member)
      if (engine_->is_dead(group_.local_ranks[member])) members.push_back(member);
    return members;
  });
}

void EngineCommunicator::check_health() {
  if (ended_) return;
  check_local_members();
  if (!ended_) check_receives_of_any_source();
  if (!ended_) check_deadline();
  if (ended_ || !interhost_) return;
  if (auto error = interhost_->check(traffic_)) fail(error->kind(), error->what());
}

std::string EngineCommunicator::what_is_pending() const {
  auto [item, locals] = traffic_.oldest();
  if (!item) return "";
  uint64_t members = interhost_ ? interhost_->blocking_ranks(traffic_) : locals;
  std::string names = rank_names(global_ranks_, members & ~(uint64_t{1} << rank()));
  std::string who = group_.name(group_.rank) + (names.empty() ? " is not done" : " waits for " + names);
  std::string crosswise = engine_->who_waits_for_me(local_ranks(locals), *this);
  return who + " since " + seconds_text(Clock::now() - item->since) + " in " + describe(item->operation) +
         (crosswise.empty() ? "" : "; meanwhile " + crosswise);
}

void EngineCommunicator::check_local_members() {
  for (int member = 0; member < group_.size; ++member) {
    if (member == group_.rank) continue;
    bool dead = engine_->is_dead(group_.local_ranks[member]);  // before its end_record is read: it may say why
    const shm::EndRecord& end_record = group_.block(member).end_record;
    auto standing = static_cast<shm::Standing>(end_record.standing.load(std::memory_order_acquire));
    if (standing == shm::Standing::Member && !dead) continue;
    while (standing != shm::Standing::Left && advance_traffic()) continue;  // what that one has ended still ends here
    if (standing == shm::Standing::Failed) return fail(static_cast<ErrorKind>(end_record.kind), end_record.text);
    const Lane::Item* item = traffic_.oldest().item;
    std::string what = item ? " while " + group_.name(group_.rank) + " was in " + describe(item->operation) : "";
    if (standing == shm::Standing::Member) return fail(ErrorKind::PeerLost, group_.name(member) + " died" + what);
    // What it did before it left is visible only now.
    if (item && traffic_.missing(true) >> member & 1)
      return fail(ErrorKind::PeerLost,
                  group_.name(member) + " has left (it exited or called syncengine.shutdown())" + what);
  }
}

bool EngineCommunicator::have_all_others_left() const {
  if (interhost_ && !interhost_->have_all_left()) return false;
  for (int member = 0; member < group_.size; ++member) {
    const auto standing = group_.block(member).end_record.standing.load(std::memory_order_acquire);  // acquire: headers
    if (member != group_.rank && standing != static_cast<uint32_t>(shm::Standing::Left)) return false;
  }
  return true;
}

// A message may come from whoever is still there, and from this rank itself unless it waits: nothing else fails.
void EngineCommunicator::check_receives_of_any_source() {
  Messenger& messenger = traffic_.messenger();
  if (messenger.idle() || !have_all_others_left() || !messenger.waits_in_vain()) return;
  messenger.give_up_receives_of_any(rank_names(global_ranks(), ~(uint64_t{1} << rank())) +
                                    (size() == 2 ? " has left (it exited" : " have left (they exited") +
                                    " or called syncengine.shutdown()) while " + group_.name(group_.rank) + " was in ");
}

void EngineCommunicator::check_deadline() {
  const Lane::Item* item = traffic_.oldest().item;
  if (!item) return;
  Duration age = Clock::now() - item->since;
  if (age < std::min(engine_->options().log_after, engine_->options().timeout)) return;
  if (age >= engine_->options().timeout) {
    return fail(ErrorKind::Timeout, what_is_pending() + ": the timeout is " + seconds_text(engine_->options().timeout) +
                                        "; see what those ranks are doing, or raise init(timeout=...)");
  }
  if (logged_ == item->since) return;
  logged_ = item->since;
  engine_->lock().log(what_is_pending());
}

DeadlockDetector::Wait EngineCommunicator::wait_of(const Work& work) const {
  uint64_t locals = work.ended() || ended_ ? 0 : traffic_.not_called(work.place);
  return {group_.offsets[group_.rank], work.place, local_ranks(locals & ~(uint64_t{1} << group_.rank))};
}

bool EngineCommunicator::has_block(int local_rank, uint64_t offset) const {
  for (int member = 0; member < group_.size; ++member) {
    if (group_.local_ranks[member] == local_rank && group_.offsets[member] == offset) return true;
  }
  return false;
}

std::string EngineCommunicator::describe_wait(const Work& work) const {
  const Lane::Item* item =
      work.place.lane == shm::kUserLane ? traffic_.lane(shm::kUserLane).oldest() : traffic_.schedule().oldest();
  return item ? describe(item->operation) : "a collective";
}

}  // namespace syncengine
