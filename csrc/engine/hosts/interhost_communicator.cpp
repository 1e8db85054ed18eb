#include "engine/hosts/interhost_communicator.h"

#include <algorithm>

#include "base/texts.h"
#include "engine/hosts/measure.h"
#include "engine/lanes/mismatch.h"

namespace syncengine::hosts {

namespace {

constexpr auto kLate = std::chrono::milliseconds(100);  // of waiting: then the other hosts hear for whom

}  // namespace

std::shared_ptr<InterhostCommunicator> InterhostCommunicator::create(std::shared_ptr<Network> network, uint32_t group,
                                                                     int rank, const std::vector<Member>& members,
                                                                     Origin origin) {
  std::vector<int> labels, job_ranks, global_ranks;
  for (const Member& member : members) {
    labels.push_back(member.label);
    job_ranks.push_back(member.job_rank);
    global_ranks.push_back(member.global_rank);
  }
  Links links{.placement = Placement(rank, labels),
              .group = group,
              .job_ranks = std::move(job_ranks),
              .global_ranks = std::move(global_ranks),
              .counterparts = counterparts(Placement(rank, labels)),
              .network = std::move(network)};
  std::vector<int> names, locals;
  std::vector<uint64_t> offsets;
  for (int local : links.placement.locals()) {
    names.push_back(members[local].global_rank);
    locals.push_back(members[local].local_rank);
    offsets.push_back(members[local].offset);
  }
  auto engine = links.network->engine();
  links.choice = choose_interhost(links.placement, engine->options().host_algorithm, links.network->speed(),
                                  InterhostExchange::all_reduce_chunk(links.placement));
  Group own = make_group(*engine, links.placement.local_index(rank), names, locals, offsets);
  std::shared_ptr<InterhostCommunicator> made(new InterhostCommunicator(std::move(links), own, origin));
  engine->locked([&] { made->links_.network->enroll(group, made.get()); });
  engine->add(made.get());
  return made;
}

InterhostCommunicator::InterhostCommunicator(Links links, const Group& locals, Origin origin)
    : InterhostParts{.links_ = std::move(links)},
      ShmCommunicator(
          links_.network->engine(), locals, origin, [this](const Group& group, const auto& stop, Lane::Trash& trash) {
            Algorithm algorithm = links_.network->engine()->options().algorithm;
            auto lane = [&](int id) {
              return std::make_unique<Lane>(group, id, algorithm, stop, trash, [&](LaneState& state) {
                auto exchange = std::make_unique<InterhostExchange>(links_, state, algorithm);
                exchanges_[id] = exchange.get();
                return exchange;
              });
            };
            Parts parts{lane(shm::kUserLane), lane(shm::kScheduledLane), nullptr, nullptr};
            auto schedule = std::make_unique<InterhostSchedule>(links_, group, *parts.scheduled_lane);
            interhost_schedule_ = schedule.get();
            parts.schedule = std::move(schedule);
            auto route = std::make_unique<InterhostRoute>(links_);
            interhost_route_ = route.get();
            parts.messenger = std::make_unique<Messenger>(
                links_.placement.rank, links_.global_ranks,
                std::make_unique<MailboxRoute>(group, links_.placement.locals(), stop), std::move(route), trash);
            return parts;
          }) {
  for (int member = 0; member < size(); ++member) member_of_[links_.job_ranks[member]] = member;
}

InterhostCommunicator::~InterhostCommunicator() {
  if (engine_->arena()->forked()) return;
  engine_->locked([&] { leave(); });
  engine_->remove(this);
}

void InterhostCommunicator::measure(const std::function<void()>& interrupted) {
  HostAlgorithm algorithm = engine_->options().host_algorithm;
  if (algorithm != HostAlgorithm::Auto || !speed_matters(links_.placement)) return;
  LinkSpeed speed = measure_links(*this, links_.placement, interrupted);
  engine_->locked([&] {
    links_.network->set_speed(speed);
    links_.choice =
        choose_interhost(links_.placement, algorithm, speed, InterhostExchange::all_reduce_chunk(links_.placement));
  });
}

std::string InterhostCommunicator::describe_links() const {
  return engine_->locked([&] {
    const Network& network = *links_.network;
    return syncengine::describe(links_.choice) +
           (network.is_measured() ? "; measured " + syncengine::describe(network.speed()) : "");
  });
}

void InterhostCommunicator::hear(int peer, const std::string& message) {
  auto found = member_of_.find(peer);
  if (found == member_of_.end()) throw Error(ErrorKind::PeerLost, "a message came from outside the communicator");
  int member = found->second;
  Head head;
  std::memcpy(&head, message.data(), sizeof(head));
  switch (head.kind) {
    case Kind::Opened: {
      auto opened = read<Opened>(message);
      if (opened.lane >= shm::kLanes) break;
      return exchanges_[opened.lane]->agreement().hear(member, opened);
    }
    case Kind::Flags: {
      auto flags = read<Flags>(message);
      if (flags.lane >= shm::kLanes) break;
      return exchanges_[flags.lane]->agreement().hear(member, flags);
    }
    case Kind::Ready: return interhost_schedule_->hear(member, read<Ready>(message));
    case Kind::Scheduled: return interhost_schedule_->hear(member, read<Scheduled>(message));
    case Kind::Late: late_[member] = read<Late>(message).members; return;
    case Kind::Ended: return hear_ended(member, read<Ended>(message));
    case Kind::Announced: {
      size_t head_bytes = std::min(message.size(), sizeof(Announced));
      return interhost_route_->hear(member, read<Announced>(message.substr(0, head_bytes)), message.substr(head_bytes));
    }
    case Kind::Heard: return interhost_route_->hear(member, read<Heard>(message));
  }
  throw Error(ErrorKind::PeerLost, links_.name(member) + " sent an unknown message");
}

void InterhostCommunicator::hear_ended(int member, const Ended& ended) {
  if (ended.standing == static_cast<uint32_t>(shm::Standing::Failed)) {
    std::string text(ended.text, strnlen(ended.text, sizeof(ended.text)));
    return ShmCommunicator::fail(static_cast<ErrorKind>(std::min(ended.error, uint32_t{4})), text);
  }
  left_[member] = ended;
}

void InterhostCommunicator::check_health() {
  ShmCommunicator::check_health();
  if (!ended_) check_remote_members();
  if (!ended_) tell_who_is_late();
}

void InterhostCommunicator::check_remote_members() {
  const Lane::Item* item = parts_.oldest().item;
  std::string what = item ? " while " + links_.name(rank()) + " was in " + describe(item->operation) : "";
  bool pending[] = {parts_.user_lane->oldest() != nullptr,
                    parts_.scheduled_lane->oldest() || parts_.schedule->oldest()};
  for (int member = 0; member < size(); ++member) {
    if (!links_.is_remote(member)) continue;
    auto error = links_.network->interhost().failure(links_.job_ranks[member]);
    if (error && !left_.contains(member)) links_.network->hear_all();  // its last words came before
    if (ended_) return;
    auto left = left_.find(member);
    if (left == left_.end()) {
      if (error) return fail(error->kind(), error->what() + what);
      continue;
    }
    // What it had completed, it has sent.
    bool in_vain = interhost_route_->waits_for(parts_.messenger->matcher(), member, left->second.tally);
    for (int id = 0; id < shm::kLanes; ++id)
      in_vain |= pending[id] && left->second.completed[id] <=
                                    (id == shm::kUserLane ? parts_.user_lane : parts_.scheduled_lane)->retired();
    if (in_vain)
      return fail(ErrorKind::PeerLost,
                  links_.name(member) + " has left (it exited or called syncengine.shutdown())" + what);
  }
}

bool InterhostCommunicator::have_all_others_left() const {
  const auto remote = static_cast<size_t>(size() - group_.size);
  return left_.size() == remote && ShmCommunicator::have_all_others_left();
}

// A rank that waits for another one of its host holds up ranks elsewhere that can't see that one.
void InterhostCommunicator::tell_who_is_late() {
  const Lane::Item* item = parts_.oldest().item;
  uint64_t members = item && Clock::now() - item->since > kLate ? absent_here() : 0;
  if (members == told_late_) return;
  told_late_ = members;
  for (int member = 0; member < size(); ++member)
    if (links_.is_remote(member)) links_.tell(member, Late{.head = {}, .members = members});
}

// Members of the own host that have not made the call that is waited for.
uint64_t InterhostCommunicator::absent_here() const {
  const Lane::Item* item = parts_.oldest().item;
  uint64_t locals = 0;
  if (item == parts_.user_lane->oldest())
    locals = parts_.user_lane->not_called(parts_.user_lane->retired());
  else if (item == parts_.schedule->oldest())
    locals = parts_.schedule->not_announced(item->work->place.number, item->work->place.epoch);
  uint64_t members = 0;
  for (int i = 0; i < group_.size; ++i) members |= (locals >> i & 1) << links_.placement.locals()[i];
  return members;
}

std::string InterhostCommunicator::names_of_blocking_ranks(const Pending& pending) const {
  bool is_message = pending.item && pending.item == parts_.messenger->oldest();
  uint64_t members = absent_here();
  if (!is_message)
    for (auto [member, others] : late_) members |= others;
  if (members == 0) {
    for (int i = 0; i < group_.size; ++i) members |= (pending.blocking_ranks >> i & 1) << links_.placement.locals()[i];
    if (is_message)
      members |= interhost_route_->remote_blocking_ranks(parts_.messenger->matcher());
    else if (pending.item && pending.item == parts_.schedule->oldest())
      members |= interhost_schedule_->remote_blocking_ranks();
    else if (pending.item)
      members |=
          exchanges_[pending.item->key == Lane::kNoKey ? shm::kUserLane : shm::kScheduledLane]->remote_blocking_ranks();
  }
  return rank_names(links_.global_ranks, members & ~(uint64_t{1} << rank()));
}

// A peer that failed has said why before its connection ended.
void InterhostCommunicator::fail(ErrorKind kind, const std::string& text) {
  if (kind == ErrorKind::PeerLost && !ended_) links_.network->hear_all();
  ShmCommunicator::fail(kind, text);
}

// Nothing that comes from another host may touch this rank's memory when its callers hear of the end.
void InterhostCommunicator::end(shm::Standing standing, const Error& for_peers, const Error& raised_here) {
  if (ended_) return;
  links_.network->forget(links_.group);
  links_.network->withdraw(links_.group, links_.job_ranks, for_peers);
  Ended ended{.head = {},
              .standing = static_cast<uint32_t>(standing),
              .error = static_cast<uint32_t>(for_peers.kind()),
              .completed = {parts_.user_lane->retired(), parts_.scheduled_lane->retired()},
              .tally = {},
              .text = {}};
  std::string(for_peers.what()).copy(ended.text, sizeof(ended.text) - 1);
  for (int member = 0; member < size(); ++member) {
    if (!links_.is_remote(member)) continue;
    ended.tally = interhost_route_->tally(member);
    links_.tell(member, ended);
  }
  ShmCommunicator::end(standing, for_peers, raised_here);
}

uint64_t InterhostCommunicator::take_number(uint64_t members) {
  uint64_t here = 0;
  for (int member : links_.placement.locals()) here |= uint64_t{1} << member;
  if ((members & ~here) == 0) return 0;  // it will need no network
  return engine_->locked([&] { return links_.network->take_number(links_.job_ranks[rank()]); });
}

std::shared_ptr<void> InterhostCommunicator::expect_group() {
  auto network = links_.network;
  uint64_t expected = engine_->locked([&] { return network->expect(); });
  return {nullptr,
          [network, expected](void*) { network->engine()->locked([&] { network->expect_no_more(expected); }); }};
}

// Members that all live on this host need no network.
std::shared_ptr<Communicator> InterhostCommunicator::join(const std::vector<int>& members,
                                                          const std::vector<Ticket>& tickets) {
  std::vector<Member> joined;
  std::vector<int> here;
  std::vector<Ticket> tickets_here(group_.size);
  for (int member : members) {
    joined.push_back({.label = links_.placement.host_of[member],
                      .job_rank = links_.job_ranks[member],
                      .global_rank = links_.global_ranks[member],
                      .offset = tickets[member].offset});
    if (links_.is_remote(member)) continue;
    here.push_back(links_.placement.local_index(member));
    joined.back().local_rank = group_.local_ranks[here.back()];
    tickets_here[here.back()] = tickets[member];
  }
  if (here.size() == members.size()) return ShmCommunicator::join(here, tickets_here);
  int rank_in_group = static_cast<int>(std::find(members.begin(), members.end(), rank()) - members.begin());
  auto number = static_cast<uint32_t>(tickets[members.front()].number);
  return create(links_.network, number, rank_in_group, joined, Origin::Split);
}

}  // namespace syncengine::hosts
