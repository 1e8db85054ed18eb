#include "engine/communicator/membership.h"

#include <bit>
#include <utility>

#include "base/checked.h"
#include "base/texts.h"
#include "base/trace.h"
#include "engine/communicator/communicator.h"
#include "engine/lanes/mismatch.h"

namespace syncengine {

namespace {

// Records the error in the trace, if there is one, and returns it with the trace's folder appended to its text.
Error in_trace(const Error& error) {
  if (!trace::is_on()) return error;
  trace::record_text(trace::Kind::Error, error.what());
  const std::string file = trace::path();
  return {error.kind(),
          std::string(error.what()) + " (the last events of each rank are in " + file.substr(0, file.rfind('/')) + ")"};
}

bool have_all_others_left(const Members& members) {
  if (members.interhost && !members.interhost->have_all_left()) return false;
  const Group& group = members.group;
  for (int member = 0; member < group.size; ++member) {
    const auto standing = group.block(member).end_record.standing.load(std::memory_order_acquire);  // acquire: headers
    if (member != group.rank && standing != static_cast<uint32_t>(shm::Standing::Left)) return false;
  }
  return true;
}

// Gives this rank's block back to the arena once every member has left the communicator: until then some may still read
// results from it. If members have died, keeps it a second at least, since other threads of theirs may still run.
void give_back_block(Engine& engine, const Group& group, const std::vector<size_t>& fragments) {
  const uint64_t me = uint64_t{1} << group.rank, others = ~uint64_t{0} >> (64 - group.size) & ~me;
  uint64_t living = others;
  engine.locked([&] {
    for (int member = 0; member < group.size; ++member)
      if (engine.locals().is_dead(group.local_ranks[member])) living &= ~(uint64_t{1} << member);
  });
  const auto settled = Deadline::after(std::chrono::seconds(living == others ? 0 : 1));
  for (int member = 0; member < group.size; ++member) {
    if (member != group.rank) group.block(member).gone.fetch_or(me, std::memory_order_release);  // release: our reads
  }
  auto unused = [&gone = group.own().gone, living, settled] {
    return settled.passed() && (living & ~gone.load(std::memory_order_acquire)) == 0;  // acquire: theirs
  };
  for (size_t offset : fragments) group.arena->retire_group(offset, MailboxRoute::kFragmentsBytes, unused);
  group.arena->retire_group(group.offsets[group.rank], sizeof(shm::GroupBlock), unused);
}

}  // namespace

Members Members::make(Engine& engine, Placement placement, std::vector<int> global_ranks, std::vector<int> local_ranks,
                      std::vector<uint64_t> offsets, std::unique_ptr<hosts::InterhostMembers> interhost,
                      uint64_t trace_id) {
  Group group{.rank = placement.local_index(placement.rank),
              .size = static_cast<int>(local_ranks.size()),
              .id = trace_id,
              .local_ranks = std::move(local_ranks),
              .offsets = std::move(offsets),
              .arena = engine.arena().get(),
              .bell = &engine.bell()};
  for (int member : placement.locals()) group.global_ranks.push_back(global_ranks[member]);
  for (int member = 0; member < group.size; ++member) {
    group.arenas.push_back(member == group.rank ? nullptr : engine.locals().peer(group.local_ranks[member]));
    std::byte* block = group.memory(member, group.offsets[member], sizeof(shm::GroupBlock), shm::kPage);
    group.blocks.push_back(reinterpret_cast<shm::GroupBlock*>(block));
  }
  return {std::move(placement), std::move(global_ranks), std::move(group), std::move(interhost)};
}

Members Members::select(Engine& engine, uint64_t chosen, const std::function<uint64_t(int member)>& offset_of,
                        uint64_t number, uint64_t splits) const {
  uint64_t trace_id = mix(group.id, splits);  // all members know both
  std::vector<int> members, labels, globals, locals;
  std::vector<uint64_t> offsets;
  for (int member = 0; member < placement.size; ++member) {
    if (!(chosen >> member & 1)) continue;
    trace_id = mix(trace_id, static_cast<uint64_t>(member));
    members.push_back(member);
    labels.push_back(placement.host_of[member]);
    globals.push_back(global_ranks[member]);
    if (on_other_host(member)) continue;
    locals.push_back(group.local_ranks[placement.local_index(member)]);
    offsets.push_back(offset_of(member));
  }
  Placement next(std::popcount(chosen & ((uint64_t{1} << placement.rank) - 1)), labels);
  std::unique_ptr<hosts::InterhostMembers> parts;
  if (next.hosts() > 1) parts = interhost->split(number, next, members, globals);
  return make(engine, std::move(next), std::move(globals), std::move(locals), std::move(offsets), std::move(parts),
              trace_id);
}

Membership::Membership(Engine& engine, const Members& members, Submissions& submissions, Origin origin)
    : engine_(engine),
      members_(members),
      group_(members.group),
      submissions_(submissions),
      // A rank that shares its host waits for ranks there, too, so it can't sleep in the loop that serves other hosts.
      io_loop_(members.interhost && engine.locals().size() == 1 ? members.interhost->io_loop() : nullptr),
      origin_(origin),
      traffic_(group_, members.placement, members.global_ranks, engine.options().algorithm, engine.lock().trash(),
               members.interhost ? members.interhost->make_parts() : Traffic::Parts{}) {}

void Membership::begin() {
  const auto fail_at_once = [this](const Error& error) { end(shm::Standing::Failed, error, error); };
  engine_.locked([&] {
    if (members_.interhost) members_.interhost->enroll(fail_at_once);
    engine_.progressables().add(this);
  });
}

Membership::~Membership() {
  if (engine_.arena()->forked()) return;
  engine_.locked([&] {
    leave();
    if (members_.interhost) members_.interhost->forget();
    engine_.progressables().remove(this);
  });
  if (origin_ == Origin::Split) give_back_block(engine_, group_, traffic_.messenger().near().fragments());
}

bool Membership::advance() {
  if (ended_) return false;
  bool moved = take_calls();
  moved |= advance_traffic();
  if (moved) group_.bell->ring_interested();
  return moved;
}

bool Membership::take_calls() {
  submissions_.swap(taken_);
  const bool moved = !taken_.operations.empty();
  traffic_.take(taken_);
  return moved;
}

bool Membership::advance_traffic() {
  try {
    return !ended_ && traffic_.advance();
  } catch (const Error& error) {
    fail(error.kind(), error.what());
  } catch (const std::exception& error) {  // such as std::bad_alloc
    fail(ErrorKind::Aborted, group_.name(group_.rank) + ": " + error.what());
  }
  return true;
}

void Membership::refuse(const Slots& slots, uint64_t step, const std::string& text) {
  if (ended_) return;
  take_calls();  // calls that were announced before
  traffic_.schedule().refuse(slots, slots.number(step), text);
  group_.bell->ring_all();
}

void Membership::lose_direct_memory(const Error& cause) {
  for (const ArenaRange& range : traffic_.direct_memory()) {
    if (group_.arena->is_severed(range.offset, range.bytes)) return fail(cause.kind(), cause.what());
  }
}

// At PeerLost, messages that have come are heard first: the peer may have said why, before its connection ended.
void Membership::fail(ErrorKind kind, const std::string& text) {
  if (members_.interhost && kind == ErrorKind::PeerLost && !ended_) members_.interhost->hear_all();
  Error error(kind, text);
  end(shm::Standing::Failed, error, error);
}

// Leaving is a failure while peers may use this rank's tensors: they must be told to stop, and kept from going on.
void Membership::leave() {
  closed_ = true;
  uint64_t not_come = 0;  // shrink() need not wait for this rank
  group_.own().succession.arrived.compare_exchange_strong(not_come, shm::kNeverComes, std::memory_order_acq_rel);
  Error closed(ErrorKind::InvalidUsage, kClosed);
  // If a refused step has not ended, members still need its end, so leaving now is a failure.
  if (const std::string refusal = traffic_.schedule().refusal_met(); !refusal.empty())
    return end(shm::Standing::Failed, Error(ErrorKind::Aborted, refusal), closed);
  if (traffic_.direct_memory().empty()) return end(shm::Standing::Left, closed, closed);
  Error left(ErrorKind::PeerLost, group_.name(group_.rank) +
                                      " has left (it exited or called syncengine.shutdown()) while its " +
                                      describe(traffic_.oldest().item->operation) + " was pending");
  end(shm::Standing::Failed, left, closed);
}

// Ends this rank's part; later calls do nothing. Peers are told before this rank's own callers are. At a failure,
// tensors are severed from peers that might still use them (ArenaRange::apart) before the owners touch them.
void Membership::end(shm::Standing standing, const Error& for_peers, const Error& raised_here) {
  if (ended_) return;
  if (members_.interhost) members_.interhost->end(standing, for_peers, traffic_);
  ended_ = true;
  for (int lane = 0; lane < shm::kLanes; ++lane) group_.own().end_record.ended[lane] = traffic_.lane(lane).retired();
  write_end_record(group_.own().end_record, standing, for_peers.kind(), for_peers.what());
  std::atomic_thread_fence(std::memory_order_seq_cst);  // before this rank writes to memory that peers read
  Error raised = raised_here;
  if (standing == shm::Standing::Failed) {
    try {
      engine_.sever_tensors(traffic_.direct_memory(), for_peers);
    } catch (const Error& exposed) {
      raised = Error(exposed.kind(), std::string(raised_here.what()) + "; " + exposed.what());
    }
  }
  auto error = std::make_exception_ptr(standing == shm::Standing::Failed ? in_trace(raised) : raised);
  traffic_.end(submissions_.end(error), error);
  group_.bell->ring_all();
  engine_.wake_io_loop();
}

void Membership::check_health() {
  if (ended_) return;
  check_local_members();
  if (!ended_) check_receives_of_any_source();
  if (!ended_) check_deadline();
  if (ended_ || !members_.interhost) return;
  if (auto error = members_.interhost->check(traffic_)) fail(error->kind(), error->what());
}

std::string Membership::what_is_pending() const {
  auto [item, locals] = traffic_.oldest();
  if (!item) return "";
  uint64_t members = members_.interhost ? members_.interhost->blocking_ranks(traffic_) : locals;
  std::string names = rank_names(members_.global_ranks, members & ~(uint64_t{1} << members_.placement.rank));
  std::string who = group_.name(group_.rank) + (names.empty() ? " is not done" : " waits for " + names);
  std::string crosswise = engine_.sleepers().who_waits_for_me(renumbered(locals, group_.local_ranks), *this);
  return who + " since " + seconds_text(Clock::now() - item->since) + " in " + describe(item->operation) +
         (crosswise.empty() ? "" : "; meanwhile " + crosswise);
}

void Membership::check_local_members() {
  for (int member = 0; member < group_.size; ++member) {
    if (member == group_.rank) continue;
    bool dead = engine_.locals().is_dead(group_.local_ranks[member]);  // read before its end record, which may say why
    const shm::EndRecord& end_record = group_.block(member).end_record;
    const auto word = end_record.standing.load(std::memory_order_acquire);
    const auto known = Checked<shm::Standing>::at_most(shm::Standing::Left, word);
    if (!known) return fail(ErrorKind::PeerLost, group_.name(member) + " ended in no known way" + kDamaged);
    const shm::Standing standing = known->get();
    if (standing == shm::Standing::Member && !dead) continue;
    while (standing != shm::Standing::Left && advance_traffic()) continue;  // ends here all that has ended there
    if (standing == shm::Standing::Failed) {
      const auto kind = Checked<ErrorKind>::at_most(kLastErrorKind, load_once(end_record.kind));
      return fail(kind ? kind->get() : ErrorKind::PeerLost, checked_text(end_record.text));
    }
    const Lane::Item* item = traffic_.oldest().item;
    const std::string refusal = traffic_.schedule().refusal_of(member);
    std::string what = item ? " while " + group_.name(group_.rank) + " was in " + describe(item->operation) : "";
    if (standing == shm::Standing::Member)
      return refusal.empty() ? fail(ErrorKind::PeerLost, group_.name(member) + " died" + what)
                             : fail(ErrorKind::Aborted, refusal);
    // Everything that the member did before it left is visible now, so an operation that still misses it never ends.
    if (item && traffic_.missing(true) >> member & 1)
      return fail(ErrorKind::PeerLost,
                  group_.name(member) + " has left (it exited or called syncengine.shutdown())" + what);
  }
}

void Membership::check_receives_of_any_source() {
  const Messenger& messenger = traffic_.messenger();
  if (messenger.idle() || !have_all_others_left(members_) || advance_traffic()) return;
  if (const Message* receive = messenger.waits_in_vain())
    fail(ErrorKind::PeerLost, rank_names(members_.global_ranks, ~(uint64_t{1} << members_.placement.rank)) +
                                  (members_.placement.size == 2 ? " has left (it exited" : " have left (they exited") +
                                  " or called syncengine.shutdown()) while " + group_.name(group_.rank) + " was in " +
                                  receive->describe());
}

void Membership::check_deadline() {
  const Lane::Item* item = traffic_.oldest().item;
  if (!item) return;
  Duration age = Clock::now() - item->since;
  if (age >= engine_.options().timeout)
    return fail(ErrorKind::Timeout, what_is_pending() + ": the timeout is " + seconds_text(engine_.options().timeout) +
                                        "; see what those ranks are doing, or raise " + engine_.options().timeout_call);
  if (age < engine_.options().log_after || logged_ == item->since) return;
  logged_ = item->since;
  engine_.lock().log(what_is_pending());
}

DeadlockDetector::Wait Membership::wait_of(const Work& work) const {
  uint64_t locals = work.ended() || ended_ ? 0 : traffic_.not_called(work.place);
  locals &= ~(uint64_t{1} << group_.rank);
  return {group_.offsets[group_.rank], work.place, renumbered(locals, group_.local_ranks)};
}

bool Membership::has_block(int local_rank, uint64_t offset) const {
  for (int member = 0; member < group_.size; ++member) {
    if (group_.local_ranks[member] == local_rank && group_.offsets[member] == offset) return true;
  }
  return false;
}

std::string Membership::describe_wait(const Work& work) const {
  const Lane::Item* item =
      work.place.lane == shm::kUserLane ? traffic_.lane(shm::kUserLane).oldest() : traffic_.schedule().oldest();
  return item ? describe(item->operation) : "a collective";
}

}  // namespace syncengine
