// How a communicator ends on this rank: by failure, its own or a peer's, or in good order; and what is done about
// memory that peers may still use.

#include <algorithm>
#include <atomic>

#include "base/texts.h"
#include "base/trace.h"
#include "engine/communicator/engine_communicator.h"
#include "engine/lanes/mismatch.h"

namespace syncengine {

namespace {

// Notes it in the trace, if there is one, and says where that is.
Error in_trace(const Error& error) {
  if (!trace::is_on()) return error;
  trace::record_text(trace::Kind::Error, error.what());
  const std::string file = trace::path();
  return {error.kind(),
          std::string(error.what()) + " (the last events of each rank are in " + file.substr(0, file.rfind('/')) + ")"};
}

}  // namespace

void EngineCommunicator::abort(ErrorKind kind, const std::string& text) {
  if (engine_->arena()->forked()) return;
  engine_->locked([&] {
    fail(kind, text);
    if (origin_ == Origin::Split) return;
    for (Progressable* progressable : engine_->progressables()) progressable->fail(kind, text);
  });
}

void EngineCommunicator::close() {
  if (engine_->arena()->forked()) return;
  engine_->locked([&] {
    leave();
    if (origin_ == Origin::Split) return;
    for (Progressable* progressable : engine_->progressables()) progressable->leave();
  });
  engine_->lock().await_drops();
}

void EngineCommunicator::lose_direct_memory(const Error& cause) {
  for (const ArenaRange& range : traffic_.direct_memory()) {
    if (group_.arena->is_severed(range.offset, range.bytes)) return fail(cause.kind(), cause.what());
  }
}

// A peer that failed has said why before its connection ended.
void EngineCommunicator::fail(ErrorKind kind, const std::string& text) {
  if (interhost_ && kind == ErrorKind::PeerLost && !ended_) interhost_->hear_all();
  Error error(kind, text);
  end(shm::Standing::Failed, error, error);
}

// A peer in the middle of writing this rank's tensors must be told to stop, and kept from going on.
void EngineCommunicator::leave() {
  closed_ = true;
  uint64_t not_come = 0;  // nobody waits for it in shrink()
  group_.own().succession.arrived.compare_exchange_strong(not_come, shm::kNeverComes, std::memory_order_acq_rel);
  Error closed(ErrorKind::InvalidUsage, kClosed);
  // Of a refused step, the others still need the end.
  if (const std::string refusal = traffic_.schedule().refusal_met(); !refusal.empty())
    return end(shm::Standing::Failed, Error(ErrorKind::Aborted, refusal), closed);
  if (traffic_.direct_memory().empty()) return end(shm::Standing::Left, closed, closed);
  Error left(ErrorKind::PeerLost, group_.name(group_.rank) +
                                      " has left (it exited or called syncengine.shutdown()) while its " +
                                      describe(traffic_.oldest().item->operation) + " was pending");
  end(shm::Standing::Failed, left, closed);
}

// The first end counts. Peers hear of it before this rank's own callers do; tensors are cut loose before they are
// touched.
void EngineCommunicator::end(shm::Standing standing, const Error& for_peers, const Error& raised_here) {
  if (ended_) return;
  if (interhost_) interhost_->end(standing, for_peers, traffic_);
  ended_ = true;
  for (int lane = 0; lane < shm::kLanes; ++lane) group_.own().end_record.ended[lane] = traffic_.lane(lane).retired();
  write_end_record(group_.own().end_record, standing, for_peers.kind(), for_peers.what());
  std::atomic_thread_fence(std::memory_order_seq_cst);  // before this rank's program writes to what peers still read
  if (standing == shm::Standing::Failed) engine_->sever_tensors(traffic_.direct_memory(), for_peers);
  auto error = std::make_exception_ptr(standing == shm::Standing::Failed ? in_trace(raised_here) : raised_here);
  traffic_.end(submissions_.end(error), error);
  group_.bell->ring_all();
  engine_->wake_io_loop();
}

// The own block, once every member is as far; until then some may still read results from it. Of the dead, other
// threads may run for a moment.
void EngineCommunicator::give_back_block() {
  uint64_t everybody = group_.size == 64 ? ~uint64_t{0} : (uint64_t{1} << group_.size) - 1;
  for (int member : dead()) everybody &= ~(uint64_t{1} << member);
  const auto settled =
      Deadline::after(std::chrono::seconds(everybody == (uint64_t{2} << (group_.size - 1)) - 1 ? 0 : 1));
  uint64_t me = uint64_t{1} << group_.rank;
  for (int member = 0; member < group_.size; ++member) {
    if (member != group_.rank) group_.block(member).gone.fetch_or(me, std::memory_order_release);  // release: our reads
  }
  auto& gone = group_.own().gone;
  auto unused = [&gone, everybody, me, settled] {
    return settled.passed() &&
           ((gone.load(std::memory_order_acquire) | me) & everybody) == everybody;  // acquire: theirs
  };
  for (size_t offset : traffic_.messenger().near().fragments())
    group_.arena->retire_group(offset, MailboxRoute::kFragmentsBytes, unused);
  group_.arena->retire_group(group_.offsets[group_.rank], sizeof(shm::GroupBlock), unused);
}

// What a communicator does about every 50 ms while something waits: deaths, departures and deadlines. These are the
// parts of EngineCommunicator that turn a wait that can't end into a named error.

std::vector<int> EngineCommunicator::dead() {
  engine_->throw_if_forked();
  return engine_->locked([&] {
    std::vector<int> members;
    for (int member = 0; member < group_.size; ++member)
      if (engine_->locals().is_dead(group_.local_ranks[member])) members.push_back(member);
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
  std::string crosswise = engine_->sleepers().who_waits_for_me(local_ranks(locals), *this);
  return who + " since " + seconds_text(Clock::now() - item->since) + " in " + describe(item->operation) +
         (crosswise.empty() ? "" : "; meanwhile " + crosswise);
}

void EngineCommunicator::check_local_members() {
  for (int member = 0; member < group_.size; ++member) {
    if (member == group_.rank) continue;
    bool dead = engine_->locals().is_dead(group_.local_ranks[member]);  // before its end_record is read: it may say why
    const shm::EndRecord& end_record = group_.block(member).end_record;
    auto standing = static_cast<shm::Standing>(end_record.standing.load(std::memory_order_acquire));
    if (standing == shm::Standing::Member && !dead) continue;
    while (standing != shm::Standing::Left && advance_traffic()) continue;  // what that one has ended still ends here
    if (standing == shm::Standing::Failed) return fail(static_cast<ErrorKind>(end_record.kind), end_record.text);
    const Lane::Item* item = traffic_.oldest().item;
    const std::string refusal = traffic_.schedule().refusal_of(member);
    std::string what = item ? " while " + group_.name(group_.rank) + " was in " + describe(item->operation) : "";
    if (standing == shm::Standing::Member)
      return refusal.empty() ? fail(ErrorKind::PeerLost, group_.name(member) + " died" + what)
                             : fail(ErrorKind::Aborted, refusal);
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

void EngineCommunicator::check_receives_of_any_source() {
  const Messenger& messenger = traffic_.messenger();
  if (messenger.idle() || !have_all_others_left() || advance_traffic()) return;
  if (const Message* receive = messenger.waits_in_vain())
    fail(ErrorKind::PeerLost, rank_names(global_ranks(), ~(uint64_t{1} << rank())) +
                                  (size() == 2 ? " has left (it exited" : " have left (they exited") +
                                  " or called syncengine.shutdown()) while " + group_.name(group_.rank) + " was in " +
                                  receive->describe());
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
