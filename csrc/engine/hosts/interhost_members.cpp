#include "engine/hosts/interhost_members.h"

#include <algorithm>
#include <vector>

#include "base/sync_point.h"
#include "base/texts.h"
#include "collectives/interhost_plan.h"
#include "engine/lanes/mismatch.h"

namespace syncengine::hosts {

namespace {

constexpr auto kLate = std::chrono::milliseconds(100);  // a wait that takes longer is told to the other hosts

}  // namespace

InterhostMembers::InterhostMembers(std::shared_ptr<Network> network, uint32_t group, const Placement& placement,
                                   std::vector<int> job_ranks, std::vector<int> global_ranks)
    : links_{.placement = placement,
             .group = group,
             .job_ranks = std::move(job_ranks),
             .global_ranks = std::move(global_ranks),
             .counterparts = counterparts(placement),
             .network = std::move(network),
             .choice = {}} {
  for (int member = 0; member < placement.size; ++member) member_of_[links_.job_ranks[member]] = member;
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
  auto found = member_of_.find(peer);
  if (found == member_of_.end() && was_shrunk(links_.group)) return;  // left out by shrink(), it does not know yet
  if (found == member_of_.end()) throw Error(ErrorKind::PeerLost, "a message came from outside the communicator");
  int member = found->second;
  Head head;
  std::memcpy(&head, message.data(), sizeof(head));
  if (ended_ && head.kind != Kind::Shrinks) return;
  const auto bits = [](int count) { return ~uint64_t{0} >> (64 - count); };
  const Limits limits{.members = bits(links_.placement.size),
                      .hosts = bits(links_.placement.hosts()),
                      .slots = schedule_->expected_slots()};
  // Some kinds of message are a head that is followed by more bytes.
  const std::string_view bytes = message;
  const auto head_of = [&](size_t size) { return bytes.substr(0, size); };
  const auto behind = [&](size_t size) { return std::string(bytes.substr(size)); };
  switch (head.kind) {
    case Kind::Shrinks:
      if (auto shrinks = read<Shrinks>(bytes, limits)) return void(verdicts_[member] = (*shrinks)->verdict);
      break;
    case Kind::Opened:
      if (auto opened = read<Opened>(bytes, limits))
        return exchanges_[(*opened)->lane]->agreement().hear(member, *opened);
      break;
    case Kind::Flags:
      if (auto flags = read<Flags>(bytes, limits)) return exchanges_[(*flags)->lane]->agreement().hear(member, *flags);
      break;
    case Kind::Ready:
      if (auto ready = read<Ready>(bytes, limits)) return schedule_->hear(member, *ready);
      break;
    case Kind::Scheduled:
      if (auto scheduled = read<Scheduled>(bytes, limits)) return schedule_->hear(member, *scheduled);
      break;
    case Kind::Refused:
      if (auto refused = read<Refused>(head_of(sizeof(Refused)), limits))
        return schedule_->hear(member, *refused, behind(sizeof(Refused)));
      break;
    case Kind::Late:
      if (auto late = read<Late>(bytes, limits)) return void(late_[member] = (*late)->members);
      break;
    case Kind::Ended:
      if (auto ended = read<Ended>(bytes, limits)) return hear_ended(member, *ended);
      break;
    case Kind::Announced:
      if (auto announced = read<Announced>(head_of(sizeof(Announced)), limits))
        return route_->hear(member, *announced, behind(sizeof(Announced)));
      break;
    case Kind::Heard:
      if (auto heard = read<Heard>(bytes, limits)) return route_->hear(member, *heard);
      break;
  }
  throw Error(ErrorKind::PeerLost, links_.name(member) + " sent a message that can't be" + kDamaged);
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
  std::string what =
      item ? " while " + links_.name(links_.placement.rank) + " was in " + describe(item->operation) : "";
  bool pending[] = {traffic.lane(shm::kUserLane).oldest() != nullptr,
                    traffic.lane(shm::kScheduledLane).oldest() || traffic.schedule().oldest()};
  for (int member = 0; member < links_.placement.size; ++member) {
    if (!links_.is_remote(member)) continue;
    auto error = interhost().failure(links_.job_ranks[member]);
    if (error && !left_.contains(member)) hear_all();  // the member's last words came before the failure
    if (ended_) return {};
    auto left = left_.find(member);
    const std::string refusal = error || left != left_.end() ? schedule_->remote_refusal_of(member) : "";
    if (left == left_.end()) {
      if (error && !refusal.empty()) return Error(ErrorKind::Aborted, refusal);
      if (error) return Error(error->kind(), error->what() + what);
      continue;
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

bool InterhostMembers::have_all_left() const {
  return left_.size() == links_.placement.size - links_.placement.locals().size();
}

bool InterhostMembers::has_ended(int member) const {
  return interhost().end_of(links_.job_ranks[member]) == Interhost::End::Ended;
}

// Tells other hosts whom this rank waits for on its own host: a wait within the host holds up ranks elsewhere, which
// can't see it.
void InterhostMembers::tell_who_is_late(const Traffic& traffic) {
  const Lane::Item* item = traffic.oldest().item;
  uint64_t members = item && Clock::now() - item->since > kLate ? absent_here(traffic) : 0;
  if (members == told_late_) return;
  told_late_ = members;
  for (int member = 0; member < links_.placement.size; ++member)
    if (links_.is_remote(member)) links_.tell(member, Late{.head = {}, .members = members});
}

// Members on this host that have not made the call that is waited for.
uint64_t InterhostMembers::absent_here(const Traffic& traffic) const {
  const Lane::Item* item = traffic.oldest().item;
  return item ? members_of(traffic.not_called(item->work->place)) : 0;
}

uint64_t InterhostMembers::members_of(uint64_t locals) const {
  uint64_t members = 0;
  for (int member : links_.placement.locals()) {
    members |= (locals & 1) << member;
    locals >>= 1;
  }
  return members;
}

uint64_t InterhostMembers::blocking_ranks(const Traffic& traffic) const {
  auto [item, locals] = traffic.oldest();
  bool is_message = item && item == traffic.messenger().oldest();
  uint64_t members = absent_here(traffic);
  if (!is_message)
    for (auto [member, others] : late_) members |= others;
  if (members != 0) return members;
  members = members_of(locals);
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
  Ended ended{.head = {},
              .standing = static_cast<uint32_t>(standing),
              .error = static_cast<uint32_t>(for_peers.kind()),
              .completed = {traffic.lane(shm::kUserLane).retired(), traffic.lane(shm::kScheduledLane).retired()},
              .tally = {},
              .text = {}};
  std::string(for_peers.what()).copy(ended.text, sizeof(ended.text) - 1);
  for (int member = 0; member < links_.placement.size; ++member) {
    if (!links_.is_remote(member)) continue;
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
  for (int member = 0; member < placement.size; ++member) {
    if (!links_.is_remote(member)) continue;
    if (is_new) {
      sync_point("telling");
      links_.tell(member, Shrinks{.head = {}, .verdict = told_});
    }
    const int peer = links_.job_ranks[member];
    if (interhost().failure(peer)) sees.gone |= uint64_t{1} << member;
    if (interhost().end_of(peer) != Interhost::End::Unknown) sees.ended |= uint64_t{1} << member;
  }
  hear_all();  // after it was checked who is gone: all messages of those have come
  // Members of one host tell the same verdict, though some tell a later part of it. A member that tells the decision
  // tells all of it.
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
