#include "engine/communicator/shm_communicator.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <numeric>

#include "base/interruption.h"
#include "base/sync_point.h"

namespace syncengine {

namespace {

// Bytes of one pass: bounds how long a submitter or another lane waits for the lock.
constexpr size_t kBudget = 1 << 20;

}  // namespace

Group ShmCommunicator::make_group(Engine& engine, int rank, std::vector<int> global_ranks, std::vector<int> local_ranks,
                                  const std::vector<uint64_t>& offsets) {
  Group group{.rank = rank,
              .size = static_cast<int>(local_ranks.size()),
              .global_ranks = std::move(global_ranks),
              .local_ranks = std::move(local_ranks),
              .offsets = offsets,
              .blocks = {},
              .arenas = {},
              .arena = engine.arena().get(),
              .bell = &engine.bell()};
  for (int member = 0; member < group.size; ++member) {
    group.arenas.push_back(member == rank ? nullptr : engine.peer(group.local_ranks[member]));
    std::byte* block = group.memory(member, static_cast<int64_t>(offsets[member]), sizeof(shm::GroupBlock));
    group.blocks.push_back(reinterpret_cast<shm::GroupBlock*>(block));
  }
  return group;
}

ShmCommunicator::ShmCommunicator(std::shared_ptr<Engine> engine, int rank, std::vector<int> global_ranks,
                                 std::vector<int> local_ranks, const std::vector<uint64_t>& offsets, Origin origin)
    : ShmCommunicator(
          engine, make_group(*engine, rank, std::move(global_ranks), std::move(local_ranks), offsets), origin,
          [algorithm = engine->options().algorithm](const Group& group, const auto& stop, Lane::Trash& trash) {
            Parts parts;
            parts.user_lane = std::make_unique<Lane>(group, shm::kUserLane, algorithm, stop, trash);
            parts.scheduled_lane = std::make_unique<Lane>(group, shm::kScheduledLane, algorithm, stop, trash);
            parts.schedule = std::make_unique<Schedule>(group, *parts.scheduled_lane);
            std::vector<int> ranks(group.size);
            std::iota(ranks.begin(), ranks.end(), 0);
            parts.messenger = std::make_unique<Messenger>(group.rank, group.global_ranks,
                                                          std::make_unique<MailboxRoute>(group, std::move(ranks), stop),
                                                          nullptr, trash);
            return parts;
          }) {
  engine_->add(this);
}

ShmCommunicator::ShmCommunicator(std::shared_ptr<Engine> engine, const Group& group, Origin origin,
                                 const MakeParts& make_parts)
    : engine_(std::move(engine)),
      origin_(origin),
      group_(group),
      parts_(make_parts(group_, [this] { return any_peer_failed(); }, engine_->lock().trash())) {}

ShmCommunicator::~ShmCommunicator() {
  if (engine_->arena()->forked()) return;
  engine_->locked([&] { leave(); });
  engine_->remove(this);
  if (origin_ == Origin::Split) give_back_block();
}

std::shared_ptr<Work> ShmCommunicator::enqueue(Operation operation, std::shared_ptr<const Slots> slots, size_t index) {
  engine_->throw_if_forked();
  require_supported(operation);
  return submissions_.add(std::move(operation), std::move(slots), index);
}

std::shared_ptr<Work> ShmCommunicator::submit(Operation operation) {
  auto work = enqueue(std::move(operation));
  engine_->poke(*this);
  return work;
}

void ShmCommunicator::run(Operation operation, const std::function<void()>& interrupted) {
  wait(enqueue(std::move(operation)), interrupted, {});
}

std::shared_ptr<Work> ShmCommunicator::post(Message message, bool sends) {
  engine_->throw_if_forked();
  bool any = !sends && message.peer == Message::kAnySource;
  if (!any && (message.peer < 0 || message.peer >= size()))
    throw Error(ErrorKind::InvalidUsage, message.describe() + ": rank " + std::to_string(message.peer) +
                                             " is not in 0.." + std::to_string(size() - 1));
  auto work = submissions_.add(std::move(message), sends);
  engine_->poke(*this);
  return work;
}

// Each rank names its first gap; all go on from the last one named, until all name the same.
std::shared_ptr<const Slots> ShmCommunicator::reserve_slots(size_t count, const std::function<std::string()>& describe,
                                                            const std::function<void()>& interrupted) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  auto mix = [&hash](uint64_t value) { hash = (hash ^ value) * 0x100000001b3; };
  mix(count);
  if (describe)
    for (char c : describe()) mix(static_cast<unsigned char>(c));
  auto ends = std::make_shared<std::array<int64_t, 2>>();  // the last gap named, and the first, negative
  uint64_t from = 0;
  for (;;) {
    const auto gap = static_cast<int64_t>(slots_->gap(from, count));
    *ends = {gap, -gap};
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
  if (auto slots = slots_->take(from, count)) return slots;
  std::string text = group_.name(group_.rank) + ": two threads reserve gradient buckets on one communicator at a time";
  abort(ErrorKind::InvalidUsage, text);
  throw Error(ErrorKind::InvalidUsage, text);
}

std::shared_ptr<Work> ShmCommunicator::announce(std::shared_ptr<const Slots> slots, size_t index, Operation operation) {
  auto work = enqueue(std::move(operation), std::move(slots), index);
  engine_->poke(*this);
  return work;
}

void ShmCommunicator::wait(const std::shared_ptr<Work>& work, const std::function<void()>& interrupted,
                           std::optional<Duration> at_most) {
  work->await();
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

void ShmCommunicator::throw_if_failed() const {
  engine_->throw_if_forked();
  submissions_.throw_if_ended();
}

void ShmCommunicator::check_peers() {
  engine_->throw_if_forked();
  engine_->locked([&] { check_health(); });
  throw_if_failed();
}

std::shared_ptr<void> ShmCommunicator::allocate(size_t bytes) {
  throw_if_failed();
  return engine_->arena()->allocate_tensor(bytes);
}

std::map<std::string, uint64_t> ShmCommunicator::counters() const {
  engine_->throw_if_forked();
  return engine_->locked([&] {
    auto user = parts_.user_lane->counters(), scheduled = parts_.scheduled_lane->counters();
    return std::map<std::string, uint64_t>{
        {"operations", user.operations + scheduled.operations},
        {"staged_bytes", user.staged_bytes + scheduled.staged_bytes},
        {"direct_bytes", user.direct_bytes + scheduled.direct_bytes},
        {"one_shot_bytes", user.one_shot_bytes + scheduled.one_shot_bytes},
        {"messages", parts_.messenger->messages()},
        {"direct_messages", parts_.messenger->near().direct()},
        {"interhost_bytes", user.interhost_bytes + scheduled.interhost_bytes + parts_.messenger->interhost_bytes()},
        {"sleeps", engine_->sleeps()}};
  });
}

bool ShmCommunicator::advance() {
  if (ended_) return false;
  submissions_.swap(taken_);
  bool moved = !taken_.operations.empty();
  for (Lane::Item& item : taken_.operations) {
    if (item.key == Lane::kNoKey)
      parts_.user_lane->call(std::move(item));
    else
      parts_.schedule->announce(std::move(item));
  }
  taken_.operations.clear();
  for (Post& post : taken_.posts) parts_.messenger->post(std::move(post));
  taken_.posts.clear();
  try {
    moved |= parts_.user_lane->advance(kBudget);
    moved |= parts_.schedule->advance();
    moved |= parts_.scheduled_lane->advance(kBudget);
    moved |= parts_.messenger->advance(kBudget);
  } catch (const Error& error) {
    fail(error.kind(), error.what());
    return true;
  } catch (const std::exception& error) {  // out of memory, say
    fail(ErrorKind::Aborted, group_.name(group_.rank) + ": " + error.what());
    return true;
  }
  if (moved) group_.bell->ring_interested();
  return moved;
}

uint64_t ShmCommunicator::Parts::missing(bool all) const {
  return user_lane->missing(all) | schedule->missing(all) | scheduled_lane->missing(all) | messenger->missing();
}

uint64_t ShmCommunicator::interest() const {
  if (ended_) return 0;
  return local_ranks(parts_.missing(false) | parts_.messenger->interest());
}

uint64_t ShmCommunicator::local_ranks(uint64_t members) const {
  uint64_t local = 0;
  for (int member = 0; member < group_.size; ++member) local |= (members >> member & 1) << group_.local_ranks[member];
  return local;
}

bool ShmCommunicator::any_peer_failed() const {
  std::atomic_thread_fence(std::memory_order_acquire);  // what was read of a peer's memory was read before
  for (int member = 0; member < group_.size; ++member) {
    auto standing = group_.block(member).end_record.standing.load(std::memory_order_acquire);
    if (standing == static_cast<uint32_t>(shm::Standing::Failed)) return true;
  }
  return false;
}

}  // namespace syncengine
