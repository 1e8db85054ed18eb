#include "engine/communicator/engine_communicator.h"

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "base/error.h"
#include "base/sync_point.h"
#include "base/texts.h"

namespace syncengine {

namespace {

// Of the members on this host.
Group make_group(Engine& engine, const Placement& placement, const std::vector<int>& global_ranks,
                 std::vector<int> local_ranks, std::vector<uint64_t> offsets, uint64_t trace_id) {
  Group group{.rank = placement.local_index(placement.rank),
              .size = static_cast<int>(local_ranks.size()),
              .id = trace_id,
              .global_ranks = {},
              .local_ranks = std::move(local_ranks),
              .offsets = std::move(offsets),
              .blocks = {},
              .arenas = {},
              .arena = engine.arena().get(),
              .bell = &engine.bell()};
  for (int member : placement.locals()) group.global_ranks.push_back(global_ranks[member]);
  for (int member = 0; member < group.size; ++member) {
    group.arenas.push_back(member == group.rank ? nullptr : engine.locals().peer(group.local_ranks[member]));
    std::byte* block = group.memory(member, static_cast<int64_t>(group.offsets[member]), sizeof(shm::GroupBlock));
    group.blocks.push_back(reinterpret_cast<shm::GroupBlock*>(block));
  }
  return group;
}

}  // namespace

// No message comes, and it is not moved, before all of it is there.
std::shared_ptr<EngineCommunicator> EngineCommunicator::create(std::shared_ptr<Engine> engine, Placement placement,
                                                               std::vector<int> global_ranks,
                                                               std::vector<int> local_ranks,
                                                               std::vector<uint64_t> offsets, Origin origin,
                                                               std::unique_ptr<hosts::InterhostMembers> interhost,
                                                               uint64_t trace_id) {
  Group locals = make_group(*engine, placement, global_ranks, std::move(local_ranks), std::move(offsets), trace_id);
  std::shared_ptr<EngineCommunicator> made(new EngineCommunicator(std::move(engine), std::move(placement),
                                                                  std::move(global_ranks), std::move(locals), origin,
                                                                  std::move(interhost)));
  made->engine_->locked([&] {
    if (made->interhost_)
      made->interhost_->enroll(
          [self = made.get()](const Error& error) { self->end(shm::Standing::Failed, error, error); });
    made->engine_->progressables().add(made.get());
  });
  return made;
}

EngineCommunicator::EngineCommunicator(std::shared_ptr<Engine> engine, Placement placement,
                                       std::vector<int> global_ranks, Group locals, Origin origin,
                                       std::unique_ptr<hosts::InterhostMembers> interhost)
    : engine_(std::move(engine)),
      origin_(origin),
      placement_(std::move(placement)),
      global_ranks_(std::move(global_ranks)),
      group_(std::move(locals)),
      interhost_(std::move(interhost)),
      // A rank that shares its host waits for that one's ranks as well.
      io_loop_(interhost_ && engine_->locals().size() == 1 ? interhost_->io_loop() : nullptr),
      traffic_(group_, placement_, global_ranks_, engine_->options().algorithm, engine_->lock().trash(),
               interhost_ ? interhost_->make_parts() : Traffic::Parts{}) {}

EngineCommunicator::~EngineCommunicator() {
  if (engine_->arena()->forked()) return;
  engine_->locked([&] {
    leave();
    if (interhost_) interhost_->forget();
    engine_->progressables().remove(this);
  });
  if (origin_ == Origin::Split) give_back_block();
}

std::shared_ptr<Work> EngineCommunicator::enqueue(Operation operation) {
  engine_->throw_if_forked();
  require_supported(operation);
  return submissions_.add(std::move(operation));
}

std::shared_ptr<Work> EngineCommunicator::enqueue(Operation operation, std::shared_ptr<const Slots> slots,
                                                  uint64_t slot, uint64_t step) {
  engine_->throw_if_forked();
  require_supported(operation);
  const uint64_t number = slots->number(step);
  return submissions_.add(std::move(operation), std::move(slots), slot, number);
}

std::shared_ptr<Work> EngineCommunicator::submit(Operation operation) {
  auto work = enqueue(std::move(operation));
  engine_->poke(*this);
  return work;
}

void EngineCommunicator::run(Operation operation, const std::function<void()>& interrupted) {
  wait(enqueue(std::move(operation)), interrupted, {});
}

std::shared_ptr<Work> EngineCommunicator::post(Message message, bool sends) {
  engine_->throw_if_forked();
  bool any = !sends && message.peer == Message::kAnySource;
  if (!any && (message.peer < 0 || message.peer >= size() || message.peer == rank()))
    throw Error(ErrorKind::InvalidUsage, message.describe() + ": rank " + std::to_string(message.peer) +
                                             " is not another one of 0.." + std::to_string(size() - 1) +
                                             "; what a rank would send to itself, it can copy");
  auto work = submissions_.add(std::move(message), sends);
  engine_->poke(*this);
  return work;
}

// Each rank names its first gap; all go on from the last one named, until all name the same. Their steps count from the
// highest number that some rank has given to a step.
std::shared_ptr<const Slots> EngineCommunicator::reserve_slots(size_t count,
                                                               const std::function<std::string()>& describe,
                                                               const std::function<void()>& interrupted) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  auto mix = [&hash](uint64_t value) { hash = (hash ^ value) * 0x100000001b3; };
  mix(count);
  if (describe)
    for (char c : describe()) mix(static_cast<unsigned char>(c));
  count += Slots::kBehind;
  auto ends = std::make_shared<std::array<int64_t, 3>>();  // the last gap named, and the first, negative; a step
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
    if (from == slots_->size())
      throw Error(ErrorKind::InvalidUsage,
                  "too many gradient buckets on one communicator at a time (at most " + std::to_string(from) +
                      ", one for each parameter): drop models that are no longer used, or use Communicator.split()");
    if ((*ends)[0] == -(*ends)[1]) break;
  }
  if (auto slots = slots_->take(from, count, static_cast<uint64_t>((*ends)[2]))) return slots;
  std::string text = group_.name(group_.rank) + ": two threads reserve gradient buckets on one communicator at a time";
  abort(ErrorKind::InvalidUsage, text);
  throw Error(ErrorKind::InvalidUsage, text);
}

std::shared_ptr<Work> EngineCommunicator::announce(std::shared_ptr<const Slots> slots, size_t index, uint64_t step,
                                                   Operation operation) {
  const uint64_t slot = slots->first() + index;
  auto work = enqueue(std::move(operation), std::move(slots), slot, step);
  engine_->poke(*this);
  return work;
}

void EngineCommunicator::refuse(const std::shared_ptr<const Slots>& slots, uint64_t step, const std::string& text) {
  throw_if_failed();
  engine_->locked([&] {
    if (ended_) return;
    take_calls();  // what was announced before
    traffic_.schedule().refuse(*slots, slots->number(step), text);
    group_.bell->ring_all();
  });
}

std::shared_ptr<Work> EngineCommunicator::end_refused(std::shared_ptr<const Slots> slots, uint64_t step,
                                                      std::shared_ptr<uint8_t> how) {
  Operation operation{.dtype = DType::UInt8, .op = ReduceOp::Max, .numerics = numerics()};
  operation.input = operation.output = {how.get(), sizeof(*how)};
  operation.describe = [] { return std::string("the end of a step that a rank has refused"); };
  operation.keepalive = std::move(how);
  const uint64_t slot = slots->end_slot();
  auto work = enqueue(std::move(operation), std::move(slots), slot, step);
  engine_->poke(*this);
  return work;
}

void EngineCommunicator::wait(const std::shared_ptr<Work>& work, const std::function<void()>& interrupted,
                              std::optional<Duration> at_most) {
  auto deadline = at_most ? Deadline::after(*at_most) : Deadline::never();
  auto guarded = [&] {
    // Either way the peers can't finish what this rank walks away from.
    if (deadline.passed() && !work->ended()) {
      sync_point("giving up");
      engine_->locked([&] {
        // Another thread may have ended it meanwhile.
        if (!work->ended()) fail(ErrorKind::Timeout, what_is_pending() + ": wait(timeout=...) gave up");
      });
    }
    try {
      if (interrupted) interrupted();
    } catch (const std::exception& error) {
      const std::string text = group_.name(group_.rank) + failure_text(error, "a collective");
      engine_->locked([&] { fail(ErrorKind::Aborted, text); });
      throw;
    } catch (...) {
      engine_->locked([&] { fail(ErrorKind::Aborted, group_.name(group_.rank) + " left a collective"); });
      throw;
    }
  };
  engine_->wait(*work, *this, guarded, at_most.has_value());
  work->rethrow_if_failed();
}

void EngineCommunicator::throw_if_failed() const {
  engine_->throw_if_forked();
  submissions_.throw_if_ended();
}

void EngineCommunicator::check_peers() {
  engine_->throw_if_forked();
  engine_->locked([&] { check_health(); });
  throw_if_failed();
}

std::string EngineCommunicator::describe_links() const { return interhost_ ? interhost_->describe_links() : ""; }

bool EngineCommunicator::has_device_transport() const {
  return interhost_ && interhost_->interhost().has_device_transport();
}

std::unique_ptr<DeviceTransport> EngineCommunicator::open_device_transport(int device, const std::string& name) {
  return interhost_ ? interhost_->interhost().open_device_transport(interhost_->job_ranks(), device, name) : nullptr;
}

std::shared_ptr<void> EngineCommunicator::allocate(size_t bytes) {
  throw_if_failed();
  return engine_->arena()->allocate_tensor(bytes);
}

std::map<std::string, uint64_t> EngineCommunicator::counters() const {
  engine_->throw_if_forked();
  return engine_->locked([&] {
    auto counters = traffic_.counters();
    counters["sleeps"] = engine_->sleeps();
    return counters;
  });
}

bool EngineCommunicator::advance() {
  if (ended_) return false;
  bool moved = take_calls();
  moved |= advance_traffic();
  if (moved) group_.bell->ring_interested();
  return moved;
}

bool EngineCommunicator::take_calls() {
  submissions_.swap(taken_);
  const bool moved = !taken_.operations.empty();
  traffic_.take(taken_);
  return moved;
}

bool EngineCommunicator::advance_traffic() {
  try {
    return !ended_ && traffic_.advance();
  } catch (const Error& error) {
    fail(error.kind(), error.what());
    return true;
  } catch (const std::exception& error) {  // out of memory, say
    fail(ErrorKind::Aborted, group_.name(group_.rank) + ": " + error.what());
    return true;
  }
}

uint64_t EngineCommunicator::interest() const { return ended_ ? 0 : local_ranks(traffic_.interest()); }

uint64_t EngineCommunicator::local_ranks(uint64_t locals) const {
  uint64_t local = 0;
  for (int member = 0; member < group_.size; ++member) local |= (locals >> member & 1) << group_.local_ranks[member];
  return local;
}

// Communicator.split(): the members agree on who is in, and tell each other where their blocks lie.

std::shared_ptr<Communicator> EngineCommunicator::split(const std::vector<int>& ranks,
                                                        const std::function<void()>& interrupted) {
  throw_if_failed();
  Ticket mine;
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
  bool reaches_out = std::any_of(ranks.begin(), ranks.end(), [&](int rank) { return on_other_host(rank); });
  auto expected = reaches_out ? interhost_->expect_group() : nullptr;
  if (reaches_out && std::countr_zero(mine.members) == rank()) mine.number = interhost_->take_number();

  auto tickets = std::make_shared<std::vector<Ticket>>(size());
  Operation gather{.collective = Collective::AllGather,
                   .dtype = DType::UInt8,
                   .input = {&mine, sizeof(mine)},
                   .output = {tickets->data(), tickets->size() * sizeof(Ticket)}};
  gather.describe = [] { return std::string("Communicator.split()"); };
  gather.layout_hash = 0x73706c6974;  // "split": no other all_gather matches it
  run(std::move(gather), interrupted);
  if (!mine.members) return nullptr;

  auto name = [&](int rank) { return rank_names(global_ranks(), uint64_t{1} << rank); };
  auto names = [&](uint64_t mask) { return mask == 0 ? "none" : rank_names(global_ranks(), mask); };
  std::vector<int> members;
  for (int rank = 0; rank < size(); ++rank) {
    if (!(mine.members >> rank & 1)) continue;
    if ((*tickets)[rank].members != mine.members) {
      std::string text = "split: " + name(this->rank()) + " named " + names(mine.members) + ", " + name(rank) +
                         " named " + names((*tickets)[rank].members);
      abort(ErrorKind::Mismatch, text);
      throw Error(ErrorKind::Mismatch, text);
    }
    members.push_back(rank);
  }
  return join(members, *tickets, Origin::Split);
}

std::shared_ptr<Communicator> EngineCommunicator::join(const std::vector<int>& members,
                                                       const std::vector<Ticket>& tickets, Origin origin) {
  uint64_t trace_id = (group_.id ^ splits_) * 0x100000001b3;  // FNV-1a, of what all members know
  for (int member : members) trace_id = (trace_id ^ static_cast<uint64_t>(member)) * 0x100000001b3;
  std::vector<int> labels, globals, locals;
  std::vector<uint64_t> offsets;
  for (int member : members) {
    labels.push_back(placement_.host_of[member]);
    globals.push_back(global_ranks_[member]);
    if (on_other_host(member)) continue;
    locals.push_back(group_.local_ranks[placement_.local_index(member)]);
    offsets.push_back(tickets[member].offset);
  }
  auto own = std::find(members.begin(), members.end(), rank());
  Placement placement(static_cast<int>(own - members.begin()), labels);
  std::unique_ptr<hosts::InterhostMembers> interhost;
  if (placement.hosts() > 1)
    interhost = interhost_->split(tickets[members.front()].number, placement, members, globals);
  return create(engine_, std::move(placement), std::move(globals), std::move(locals), std::move(offsets), origin,
                std::move(interhost), trace_id);
}

}  // namespace syncengine
