#include "engine/communicator/engine_communicator.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "base/error.h"
#include "base/sync_point.h"
#include "base/texts.h"

namespace syncengine {

EngineCommunicator::EngineCommunicator(std::shared_ptr<Engine> engine, Members members, Membership::Origin origin)
    : engine_(std::move(engine)), members_(std::move(members)), membership_(*engine_, members_, submissions_, origin) {
  membership_.begin();
}

std::shared_ptr<Work> EngineCommunicator::enqueue(Operation operation) {
  engine_->throw_if_unusable();
  require_supported(operation);
  return submissions_.add(std::move(operation));
}

std::shared_ptr<Work> EngineCommunicator::post(Message message, bool sends) {
  engine_->throw_if_unusable();
  bool any = !sends && message.peer == Message::kAnySource;
  if (!any && (message.peer < 0 || message.peer >= size() || message.peer == rank()))
    throw Error(ErrorKind::InvalidUsage,
                message.describe() + ": rank " + std::to_string(message.peer) + " is not another one of 0.." +
                    std::to_string(size() - 1) +
                    (message.peer == rank() ? "; what a rank would send to itself, it can copy" : ""));
  return begun(submissions_.add(std::move(message), sends));
}

// Finds slots that are free on all ranks: each rank names its first gap, and all go on from the highest one named,
// until all name the same. The numbers of steps in these slots follow the highest that any rank has given to a step.
std::shared_ptr<const Slots> EngineCommunicator::reserve_slots(size_t count,
                                                               const std::function<std::string()>& describe,
                                                               const std::function<void()>& interrupted) {
  uint64_t hash = mix(0xcbf29ce484222325, count);
  if (describe)
    for (char c : describe()) hash = mix(hash, static_cast<unsigned char>(c));
  count += Slots::kBehind;
  // Other ranks may soon announce the new slots, so messages about them are valid from now on. These slots lie below
  // this limit: no first gap begins behind the end of all slots ever taken, and that end is the same on all ranks.
  engine_->locked([&] { membership_.expect_slots(slots_->end() + count); });
  auto ends = std::make_shared<std::array<int64_t, 3>>();  // the last gap named; the first, negated; a step
  uint64_t from = 0;
  for (;;) {
    const auto gap = static_cast<int64_t>(slots_->gap(from, count));
    *ends = {gap, -gap, static_cast<int64_t>(submissions_.highest_step())};
    Operation compare{.dtype = DType::Int64, .op = ReduceOp::Max, .numerics = numerics(), .layout_hash = hash};
    compare.input = compare.output = {ends->data(), sizeof(*ends)};
    compare.describe = describe;
    compare.keepalive = ends;
    run(std::move(compare), interrupted);
    from = static_cast<uint64_t>((*ends)[0]);
    if (from >= slots_->size())
      throw Error(ErrorKind::InvalidUsage,
                  "too many gradient buckets on one communicator at a time (at most " + std::to_string(from) +
                      ", one for each parameter): drop models that are no longer used, or use Communicator.split()");
    if ((*ends)[0] == -(*ends)[1]) break;
  }
  if (auto slots = slots_->take(from, count, static_cast<uint64_t>((*ends)[2]))) return slots;
  std::string text = members_.name() + ": two threads reserve gradient buckets on one communicator at a time";
  abort(ErrorKind::InvalidUsage, text);
  throw Error(ErrorKind::InvalidUsage, text);
}

std::shared_ptr<Work> EngineCommunicator::announce(std::shared_ptr<const Slots> slots, size_t index, uint64_t step,
                                                   Operation operation) {
  engine_->throw_if_unusable();
  require_supported(operation);
  const uint64_t slot = slots->first() + index, number = slots->number(step);
  return begun(submissions_.add(std::move(operation), std::move(slots), slot, number));
}

void EngineCommunicator::refuse(const std::shared_ptr<const Slots>& slots, uint64_t step, const std::string& text) {
  throw_if_failed();
  engine_->locked([&] { membership_.refuse(*slots, step, text); });
}

void EngineCommunicator::wait(const std::shared_ptr<Work>& work, const std::function<void()>& interrupted,
                              std::optional<Duration> at_most) {
  auto deadline = at_most ? Deadline::after(*at_most) : Deadline::never();
  auto guarded = [&] {
    // Whatever interrupts this wait, peers can't finish the operation that this rank abandons: the communicator fails.
    if (deadline.passed() && !work->ended()) {
      sync_point("giving up");
      engine_->locked([&] {
        // If another thread has ended the work meanwhile, this is no timeout.
        if (!work->ended())
          membership_.fail(ErrorKind::Timeout, membership_.what_is_pending() + ": wait(timeout=...) gave up");
      });
    }
    try {
      if (interrupted) interrupted();
    } catch (const std::exception& error) {
      const std::string text = members_.name() + failure_text(error, "a collective");
      engine_->locked([&] { membership_.fail(ErrorKind::Aborted, text); });
      throw;
    } catch (...) {
      engine_->locked([&] { membership_.fail(ErrorKind::Aborted, members_.name() + " left a collective"); });
      throw;
    }
  };
  engine_->wait(*work, membership_, guarded, at_most.has_value());
  work->rethrow_if_failed();
}

void EngineCommunicator::throw_if_failed() const {
  engine_->throw_if_forked();
  submissions_.throw_if_ended();
}

void EngineCommunicator::check_peers() {
  engine_->throw_if_forked();
  engine_->locked([&] { membership_.check_health(); });
  throw_if_failed();
}

std::shared_ptr<void> EngineCommunicator::allocate(size_t bytes) {
  throw_if_failed();
  return engine_->arena()->allocate_tensor(bytes);
}

std::map<std::string, uint64_t> EngineCommunicator::counters() const {
  engine_->throw_if_forked();
  return engine_->locked([&] {
    auto counters = membership_.traffic().counters();
    counters["sleeps"] = engine_->sleeps();
    return counters;
  });
}

void EngineCommunicator::abort(ErrorKind kind, const std::string& text) {
  if (engine_->arena()->forked()) return;
  engine_->locked([&] {
    membership_.fail(kind, text);
    if (membership_.origin() == Membership::Origin::Split) return;
    for (Progressable* progressable : engine_->progressables()) progressable->fail(kind, text);
  });
}

void EngineCommunicator::close() {
  if (engine_->arena()->forked()) return;
  engine_->locked([&] {
    membership_.leave();
    if (membership_.origin() == Membership::Origin::Split) return;
    for (Progressable* progressable : engine_->progressables()) progressable->leave();
  });
  engine_->lock().await_drops();
}

std::vector<int> EngineCommunicator::ended() {
  engine_->throw_if_forked();
  return engine_->locked([&] {
    std::vector<int> ranks;
    LocalRanks& locals = engine_->locals();
    for (int member = 0; member < size(); ++member) {
      const int in_job = global_ranks()[member];
      const bool remote = members_.on_other_host(member);
      if (member == rank()) continue;
      const bool gone = !remote ? locals.is_dead(members_.group.local_ranks[members_.placement.local_index(member)])
                        : locals.sees_process(in_job) ? locals.has_ended(in_job)
                                                      : members_.interhost->has_ended(member);
      if (gone) ranks.push_back(in_job);
    }
    return ranks;
  });
}

// Communicator.split(): the members agree on who is in, and tell each other where their blocks lie.

std::shared_ptr<Communicator> EngineCommunicator::split(const std::vector<int>& ranks,
                                                        const std::function<void()>& interrupted) {
  throw_if_failed();
  // The data that each member sends to all others, about its part in the new communicator.
  struct Ticket {
    uint64_t offset = 0;   // of this rank's block for the new group
    uint64_t members = 0;  // bit per rank of the parent; 0: stays out
    uint64_t number = 0;   // between hosts: the new communicator's number, from its first member
  } mine;
  ++splits_;
  for (int rank : ranks) {
    if (rank < 0 || rank >= size())
      throw Error(ErrorKind::InvalidUsage,
                  "split: rank " + std::to_string(rank) + " is not in 0.." + std::to_string(size() - 1));
    if (mine.members >> rank & 1)
      throw Error(ErrorKind::InvalidUsage, "split: rank " + std::to_string(rank) + " is named twice");
    mine.members |= uint64_t{1} << rank;
  }
  if (mine.members && !(mine.members >> rank() & 1))
    throw Error(ErrorKind::InvalidUsage, "split: rank " + std::to_string(rank()) +
                                             " must be among the ranks it names, or pass none to stay out");
  if (mine.members) mine.offset = engine_->arena()->allocate_group(sizeof(shm::GroupBlock));
  bool reaches_out = std::any_of(ranks.begin(), ranks.end(), [&](int rank) { return members_.on_other_host(rank); });
  auto expected = reaches_out ? members_.interhost->expect_group() : nullptr;
  if (reaches_out && std::countr_zero(mine.members) == rank()) mine.number = members_.interhost->take_number();

  auto tickets = std::make_shared<std::vector<Ticket>>(size());
  Operation gather{.collective = Collective::AllGather,
                   .dtype = DType::UInt8,
                   .input = {&mine, sizeof(mine)},
                   .output = {tickets->data(), tickets->size() * sizeof(Ticket)}};
  gather.describe = [] { return std::string("Communicator.split()"); };
  gather.layout_hash = 0x73706c6974;  // "split": no other all_gather matches it
  run(std::move(gather), interrupted);
  if (!mine.members) return nullptr;

  auto names = [&](uint64_t mask) { return mask == 0 ? "none" : rank_names(global_ranks(), mask); };
  for (int rank = 0; rank < size(); ++rank) {
    if (!(mine.members >> rank & 1) || (*tickets)[rank].members == mine.members) continue;
    std::string text = "split: " + members_.name() + " named " + names(mine.members) + ", " +
                       rank_name(global_ranks()[rank]) + " named " + names((*tickets)[rank].members);
    abort(ErrorKind::Mismatch, text);
    throw Error(ErrorKind::Mismatch, text);
  }
  const auto offset_of = [&](int rank) { return rank == this->rank() ? mine.offset : (*tickets)[rank].offset; };
  const uint64_t number = (*tickets)[std::countr_zero(mine.members)].number;
  auto selected = members_.select(*engine_, mine.members, offset_of, number, splits_);
  return std::make_shared<EngineCommunicator>(engine_, std::move(selected), Membership::Origin::Split);
}

}  // namespace syncengine
