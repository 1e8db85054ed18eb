#include "engine/hosts/interhost_members.h"

#include <algorithm>

#include "base/sync_point.h"
#include "collectives/interhost_plan.h"
#include "engine/lanes/mismatch.h"

namespace syncengine::hosts {

InterhostMembers::InterhostMembers(std::shared_ptr<Network> network, uint32_t group, const Placement& placement,
                                   std::vector<int> job_ranks, std::vector<int> global_ranks)
    : links_{.placement = placement,
             .group = group,
             .job_ranks = std::move(job_ranks),
             .global_ranks = std::move(global_ranks),
             .counterparts = counterparts(placement),
             .network = std::move(network)} {
  for (int member = 0; member < placement.size; ++member)
    if (placement.host_of[member] != placement.host) links_.remotes.push_back(member);
  links_.choice = choose_interhost(placement, links_.network->engine()->options().host_algorithm,
                                   InterhostExchange::all_reduce_chunk(placement));
}

Traffic::Parts InterhostMembers::make_parts() {
  auto route = std::make_unique<InterhostRoute>(links_);
  route_ = route.get();
  return {.exchange =
              [this](LaneState& lane) {
                auto made =
                    std::make_unique<InterhostExchange>(links_, lane, links_.network->engine()->options().algorithm);
                exchanges_[lane.id] = made.get();
                return made;
              },
          .schedule =
              [this](const Group& locals, Lane& lane) {
                auto made = std::make_unique<InterhostSchedule>(links_, locals, lane);
                schedule_ = made.get();
                return made;
              },
          .route = std::move(route)};
}

void InterhostMembers::enroll(std::function<void(const Error&)> fail) {
  fail_ = std::move(fail);
  links_.network->enroll(links_.group, this);
}

void InterhostMembers::hear(int peer, const std::string& message) {
  const auto& ranks = links_.job_ranks;
  const auto found = std::find(ranks.begin(), ranks.end(), peer);
  if (found == ranks.end() && was_shrunk(links_.group)) return;  // left out by shrink(), it does not know yet
  if (found == ranks.end()) throw Error(ErrorKind::PeerLost, "a message came from outside the communicator");
  const int member = static_cast<int>(found - ranks.begin());
  Head head;
  std::memcpy(&head, message.data(), sizeof(head));
  if (ended_ && head.kind != Kind::Shrinks) return;
  const auto bits = [](int count) { return ~uint64_t{0} >> (64 - count); };
  const Limits limits{.members = bits(links_.placement.size),
                      .hosts = bits(links_.placement.hosts()),
                      .slots = schedule_->expected_slots()};
  // Messages of some kinds are a struct with more bytes behind it: head_of() and behind() return these two parts.
  const std::string_view bytes = message;
  const auto head_of = [&](size_t size) { return bytes.substr(0, size); };
  const auto behind = [&](size_t size) { return std::string(bytes.substr(std::min(size, bytes.size()))); };
  const auto damaged = [&] {
    return Error(ErrorKind::PeerLost, links_.name(member) + " sent a message that can't be" + kDamaged);
  };
  const auto sound = [&](const auto& parsed) -> const auto& {
    if (!parsed) throw damaged();
    return *parsed;
  };
  const auto agree = [&](const auto& said) { exchanges_[said->lane]->agreement().hear(member, said); };
  switch (head.kind) {
    case Kind::Shrinks: return void(verdicts_[member] = sound(read<Shrinks>(bytes, limits))->verdict);
    case Kind::Opened: return agree(sound(read<Opened>(bytes, limits)));
    case Kind::Flags: return agree(sound(read<Flags>(bytes, limits)));
    case Kind::Ready: return schedule_->hear(member, sound(read<Ready>(bytes, limits)));
    case Kind::Scheduled: return schedule_->hear(member, sound(read<Scheduled>(bytes, limits)));
    case Kind::Refused:
      return schedule_->hear(member, sound(read<Refused>(head_of(sizeof(Refused)), limits)), behind(sizeof(Refused)));
    case Kind::Late: return void(late_[member] = sound(read<Late>(bytes, limits))->members);
    case Kind::Ended: return hear_ended(member, sound(read<Ended>(bytes, limits)));
    case Kind::Announced:
      return route_->hear(member, sound(read<Announced>(head_of(sizeof(Announced)), limits)),
                          behind(sizeof(Announced)));
    case Kind::Heard: return route_->hear(member, sound(read<Heard>(bytes, limits)));
  }
  throw damaged();
}

void InterhostMembers::hear_ended(int member, const Checked<Ended>& ended) {
  if (ended->standing == static_cast<uint32_t>(shm::Standing::Failed))
    return fail_(Error(static_cast<ErrorKind>(ended->error), checked_text(ended->text)));
  left_[member] = ended.get();
}

std::optional<Error> InterhostMembers::check(const Traffic& traffic) {
  auto error = check_members(traffic);
  if (!error && !ended_) tell_who_is_late(traffic);
  return error;
}

std::optional<Error> InterhostMembers::check_members(const Traffic& traffic) {
  const Lane::Item* item = traffic.oldest().item;
  const std::string what = item ? links_.while_in(describe(item->operation)) : "";
  bool pending[] = {traffic.lane(shm::kUserLane).oldest() != nullptr,
                    traffic.lane(shm::kScheduledLane).oldest() || traffic.schedule().oldest()};
  for (int member : links_.remotes) {
    auto error = interhost().failure(links_.job_ranks[member]);
    if (error && !left_.contains(member)) hear_all();  // the member's last words came before the failure
    if (ended_) return {};
    auto left = left_.find(member);
    if (left == left_.end()) {
      if (!error) continue;
      const std::string refusal = schedule_->remote_refusal_of(member);
      return refusal.empty() ? Error(error->kind(), error->what() + what) : Error(ErrorKind::Aborted, refusal);
    }
    // Operations that the member has completed need nothing more of it, since it has sent all of its part.
    bool in_vain = route_->waits_for(traffic.messenger(), member, left->second.tally);
    for (int id = 0; id < shm::kLanes; ++id)
      in_vain |= pending[id] && left->second.completed[id] <= traffic.lane(id).retired();
    if (in_vain)
      return Error(ErrorKind::PeerLost,
                   links_.name(member) + " has left (it exited or called syncengine.shutdown())" + what);
  }
  return {};
}

// Tells other hosts whom this rank waits for on its own host: a wait within the host holds up ranks elsewhere, which
// can't see it.
void InterhostMembers::tell_who_is_late(const Traffic& traffic) {
  const Lane::Item* item = traffic.oldest().item;
  uint64_t members = item && Clock::now() - item->since > kLate ? absent_here(traffic, item) : 0;
  if (members == told_late_) return;
  told_late_ = members;
  for (int member : links_.remotes) links_.tell(member, Late{.members = members});
}

// Members on this host that have not called the operation `item`, for which this rank waits.
uint64_t InterhostMembers::absent_here(const Traffic& traffic, const Lane::Item* item) const {
  return item ? renumbered(traffic.not_called(item->work->place), links_.placement.locals()) : 0;
}

uint64_t InterhostMembers::blocking_ranks(const Traffic& traffic) const {
  auto [item, locals] = traffic.oldest();
  bool is_message = item && item == traffic.messenger().oldest();
  uint64_t members = absent_here(traffic, item);
  if (!is_message)
    for (auto [member, others] : late_) members |= others;
  if (members != 0) return members;
  members = renumbered(locals, links_.placement.locals());
  if (is_message)
    members |= route_->remote_blocking_ranks(traffic.messenger());
  else if (item && item == traffic.schedule().oldest())
    members |= schedule_->remote_blocking_ranks();
  else if (item)
    members |= exchanges_[item->key == Lane::kNoKey ? shm::kUserLane : shm::kScheduledLane]->remote_blocking_ranks();
  return members;
}

void InterhostMembers::end(shm::Standing standing, const Error& for_peers, const Traffic& traffic) {
  ended_ = true;
  links_.network->withdraw(links_.group, links_.job_ranks, for_peers);
  Ended ended{.standing = static_cast<uint32_t>(standing),
              .error = static_cast<uint32_t>(for_peers.kind()),
              .completed = {traffic.lane(shm::kUserLane).retired(), traffic.lane(shm::kScheduledLane).retired()}};
  std::string(for_peers.what()).copy(ended.text, sizeof(ended.text) - 1);
  for (int member : links_.remotes) {
    ended.tally = route_->tally(member);
    links_.tell(member, ended);
  }
}

void InterhostMembers::look_around(Outlook& sees) {
  const Placement& placement = links_.placement;
  sees.others.resize(placement.hosts());
  const HostVerdict tells = to_tell(sees.own, sees.host, sees.hosts[sees.host]);
  const bool is_new = tells != told_;
  told_ = tells;
  for (int member : links_.remotes) {
    if (is_new) {
      sync_point("telling");
      links_.tell(member, Shrinks{.verdict = told_});
    }
    const int peer = links_.job_ranks[member];
    if (interhost().failure(peer)) sees.gone |= uint64_t{1} << member;
    if (interhost().end_of(peer) != Interhost::End::Unknown) sees.ended |= uint64_t{1} << member;
  }
  hear_all();  // after it was checked who is gone: all messages of those have come
  // All members of a host tell that host's one verdict, though some tell an older state of it, so the masks of hosts in
  // `word` are merged. A decided word is complete, and replaces what was merged.
  for (const auto& [member, verdict] : verdicts_) {
    const int host = placement.host_of[member];
    auto& [members, word] = sees.others[host];
    const uint64_t decided = uint64_t{1} << host;
    members |= verdict.members;
    if (!(word & decided)) word = verdict.word & decided ? verdict.word : word | verdict.word;
  }
}

uint64_t InterhostMembers::take_number() {
  Network& network = *links_.network;
  return network.engine()->locked([&] { return network.take_number(links_.job_ranks[links_.placement.rank]); });
}

uint64_t InterhostMembers::number_of_next() const {
  const uint32_t number = after_shrink(links_.group);
  if (number == kTooMany)
    throw Error(ErrorKind::InvalidUsage,
                "shrink: the communicator came of " + std::to_string((1 << kShrinkBits) - 1) +
                    " shrinks, and no more are possible: start the job again from a checkpoint");
  return number;
}

std::shared_ptr<void> InterhostMembers::expect_group() const {
  auto network = links_.network;
  uint64_t expected = network->engine()->locked([&] { return network->expect(); });
  return {nullptr,
          [network, expected](void*) { network->engine()->locked([&] { network->expect_no_more(expected); }); }};
}

std::unique_ptr<InterhostMembers> InterhostMembers::split(uint64_t number, const Placement& placement,
                                                          const std::vector<int>& members,
                                                          std::vector<int> global_ranks) const {
  if (number == kTooMany)
    throw Error(ErrorKind::InvalidUsage, "too many communicators over several hosts: keep those that you need again");
  if (number > kTooMany)
    throw Error(ErrorKind::PeerLost,
                links_.name(members.front()) + " gave a communicator a number that is none" + kDamaged);
  std::vector<int> job_ranks;
  for (int member : members) job_ranks.push_back(links_.job_ranks[member]);
  return std::make_unique<InterhostMembers>(links_.network, static_cast<uint32_t>(number), placement,
                                            std::move(job_ranks), std::move(global_ranks));
}

}  // namespace syncengine::hosts
