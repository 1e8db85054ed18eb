#include "engine/communicator/shm_communicator.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <numeric>
#include <thread>

#include "engine/communicator/end_record.h"
#include "engine/lanes/mismatch.h"

namespace syncengine {

namespace {

// Bytes of one pass: bounds how long a submitter or another lane waits for the lock.
constexpr size_t kBudget = 1 << 20;

constexpr std::chrono::seconds kLastWorks{1};  // see await_last_works()

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
      parts_(make_parts(group_, [this] { return any_peer_failed(); }, engine_->trash())) {}

ShmCommunicator::~ShmCommunicator() {
  if (engine_->arena()->forked()) return;
  engine_->locked([&] { leave(); });
  engine_->remove(this);
  if (origin_ == Origin::Split) give_back_block();
}

// The own block, once every member is as far; until then some may still read results from it.
void ShmCommunicator::give_back_block() {
  uint64_t everybody = group_.size == 64 ? ~uint64_t{0} : (uint64_t{1} << group_.size) - 1;
  uint64_t me = uint64_t{1} << group_.rank;
  for (int member = 0; member < group_.size; ++member) {
    if (member != group_.rank) group_.block(member).gone.fetch_or(me, std::memory_order_release);  // release: our reads
  }
  auto& gone = group_.own().gone;
  auto unused = [&gone, everybody, me] {
    return (gone.load(std::memory_order_acquire) | me) == everybody;  // acquire: theirs
  };
  for (size_t offset : messenger_.near().fragments())
    group_.arena->retire_group(offset, MailboxRoute::kFragmentsBytes, unused);
  group_.arena->retire_group(group_.offsets[group_.rank], sizeof(shm::GroupBlock), unused);
}

std::shared_ptr<Work> ShmCommunicator::enqueue(Operation operation, std::shared_ptr<const Slots> slots, size_t index) {
  engine_->throw_if_forked();
  require_supported(operation);
  auto work = std::make_shared<Work>(engine_->tally());
  std::lock_guard lock(submit_mutex_);
  if (error_) {
    work->fail(error_);
    std::rethrow_exception(error_);
  }
  const uint64_t slot = slots ? slots->first() + index : Lane::kNoKey;
  work->place = !slots ? Work::Place{shm::kUserLane, submitted_++, 0}
                       : Work::Place{shm::kScheduledLane, slot, ++announced_[slot]};
  submissions_.push_back({std::move(operation), work, Clock::now(), slot, std::move(slots)});
  return work;
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
  auto work = std::make_shared<Work>(engine_->tally());
  Lane::Item item{.operation = {}, .work = work, .since = Clock::now()};
  item.operation.describe = message.describe;
  item.operation.keepalive = message.keepalive;
  {
    std::lock_guard lock(submit_mutex_);
    if (error_) {
      work->fail(error_);
      std::rethrow_exception(error_);
    }
    work->place = {shm::kMessages, 0, 0};
    posts_.push_back({std::move(message), sends, std::move(item)});
  }
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
  auto deadline = at_most ? Deadline::after(*at_most) : Deadline::never();
  auto guarded = [&] {
    // Either way the peers can't finish what this rank walks away from.
    if (deadline.passed() && !work->ended())
      engine_->locked([&] { fail(ErrorKind::Timeout, what_is_pending() + ": wait(timeout=...) gave up"); });
    try {
      if (interrupted) interrupted();
    } catch (...) {
      engine_->locked(
          [&] { fail(ErrorKind::Aborted, group_.name(group_.rank) + " was interrupted (Ctrl-C) in a collective"); });
      throw;
    }
  };
  engine_->wait(*work, *this, guarded, at_most.has_value());
  work->rethrow_if_failed();
}

void ShmCommunicator::abort(ErrorKind kind, const std::string& text) {
  if (engine_->arena()->forked()) return;
  engine_->locked([&] {
    fail(kind, text);
    if (origin_ == Origin::Split) return;
    for (Progressable* progressable : engine_->progressables()) progressable->fail(kind, text);
  });
}

void ShmCommunicator::throw_if_failed() const {
  engine_->throw_if_forked();
  std::lock_guard lock(submit_mutex_);
  if (error_) std::rethrow_exception(error_);
}

void ShmCommunicator::check_peers() {
  engine_->throw_if_forked();
  engine_->locked([&] { look_around(); });
  throw_if_failed();
}

void ShmCommunicator::close() {
  if (engine_->arena()->forked()) return;
  await_last_works();
  engine_->locked([&] {
    leave();
    if (origin_ == Origin::Split) return;
    for (Progressable* progressable : engine_->progressables()) progressable->leave();
  });
  engine_->await_drops();
}

std::shared_ptr<void> ShmCommunicator::allocate(size_t bytes) {
  throw_if_failed();
  return engine_->arena()->allocate_tensor(bytes);
}

std::map<std::string, uint64_t> ShmCommunicator::counters() const {
  engine_->throw_if_forked();
  return engine_->locked([&] {
    auto user = user_lane_.counters(), scheduled = scheduled_lane_.counters();
    return std::map<std::string, uint64_t>{
        {"operations", user.operations + scheduled.operations},
        {"staged_bytes", user.staged_bytes + scheduled.staged_bytes},
        {"direct_bytes", user.direct_bytes + scheduled.direct_bytes},
        {"one_shot_bytes", user.one_shot_bytes + scheduled.one_shot_bytes},
        {"messages", messenger_.messages()},
        {"direct_messages", messenger_.near().direct()},
        {"interhost_bytes", user.interhost_bytes + scheduled.interhost_bytes + messenger_.interhost_bytes()},
        {"sleeps", engine_->sleeps()}};
  });
}

bool ShmCommunicator::advance() {
  if (ended_) return false;
  {
    std::lock_guard lock(submit_mutex_);
    taken_.swap(submissions_);
    taken_posts_.swap(posts_);
  }
  bool moved = !taken_.empty();
  for (Lane::Item& item : taken_) {
    if (item.key == Lane::kNoKey)
      user_lane_.call(std::move(item));
    else
      schedule_.announce(std::move(item));
  }
  taken_.clear();
  for (Post& post : taken_posts_) messenger_.post(std::move(post));
  taken_posts_.clear();
  try {
    moved |= user_lane_.advance(kBudget);
    moved |= schedule_.advance();
    moved |= scheduled_lane_.advance(kBudget);
    moved |= messenger_.advance(kBudget);
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

uint64_t ShmCommunicator::missing(bool all) const {
  return user_lane_.missing(all) | schedule_.missing(all) | scheduled_lane_.missing(all) | messenger_.missing();
}

uint64_t ShmCommunicator::interest() const {
  if (ended_) return 0;
  return local_ranks(missing(false) | messenger_.interest());
}

uint64_t ShmCommunicator::local_ranks(uint64_t members) const {
  uint64_t local = 0;
  for (int member = 0; member < group_.size; ++member) local |= (members >> member & 1) << group_.local_ranks[member];
  return local;
}

bool ShmCommunicator::any_peer_failed() const {
  for (int member = 0; member < group_.size; ++member) {
    auto standing = group_.block(member).end_record.standing.load(std::memory_order_acquire);
    if (standing == static_cast<uint32_t>(shm::Standing::Failed)) return true;
  }
  return false;
}

std::vector<ArenaRange> ShmCommunicator::direct_memory() const {
  std::vector<ArenaRange> offsets;
  user_lane_.add_direct_memory(offsets);
  scheduled_lane_.add_direct_memory(offsets);
  messenger_.near().add_direct_memory(offsets);
  return offsets;
}

void ShmCommunicator::lose_direct_memory(const Error& cause) {
  for (auto [offset, bytes] : direct_memory()) {
    if (group_.arena->is_severed(offset, bytes)) return fail(cause.kind(), cause.what());
  }
}

void ShmCommunicator::fail(ErrorKind kind, const std::string& text) {
  Error error(kind, text);
  end(shm::Standing::Failed, error, error);
}

// A peer in the middle of writing this rank's tensors must be told to stop, and kept from going on.
void ShmCommunicator::set_last_words(const std::string& text, std::vector<std::shared_ptr<Work>> works) {
  engine_->locked([&] {
    last_words_ = text;
    last_works_.swap(works);
  });
}

// Peers may be about to take part: they are to hear what this rank has to say, and not that it has left.
void ShmCommunicator::await_last_works() {
  std::vector<std::shared_ptr<Work>> works;
  engine_->locked([&] { works = last_works_; });
  const auto until = Clock::now() + kLastWorks;
  auto ended = [](const auto& work) { return work->ended(); };
  while (!std::all_of(works.begin(), works.end(), ended) && Clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void ShmCommunicator::leave() {
  Error closed(ErrorKind::InvalidUsage, kClosed);
  if (!last_words_.empty() && oldest().item != nullptr) {
    return end(shm::Standing::Failed, Error(ErrorKind::Aborted, last_words_), closed);
  }
  if (direct_memory().empty()) return end(shm::Standing::Left, closed, closed);
  Error left(ErrorKind::PeerLost, group_.name(group_.rank) +
                                      " has left (it exited or called syncengine.shutdown()) while its " +
                                      describe(oldest().item->operation) + " was pending");
  end(shm::Standing::Failed, left, closed);
}

// The first end counts. Peers hear of it before this rank's own callers do; tensors are cut loose before they are touched.
void ShmCommunicator::end(shm::Standing standing, const Error& for_peers, const Error& raised_here) {
  if (ended_) return;
  ended_ = true;
  write_end_record(group_.own().end_record, standing, for_peers.kind(), for_peers.what());
  if (standing == shm::Standing::Failed) engine_->sever_tensors(direct_memory(), for_peers);
  auto error = std::make_exception_ptr(raised_here);
  std::vector<Lane::Item> late;
  std::vector<Post> late_posts;
  {
    std::lock_guard lock(submit_mutex_);
    error_ = error;
    late.swap(submissions_);
    late_posts.swap(posts_);
  }
  for (Post& post : late_posts) messenger_.post(std::move(post));
  for (Lane::Item& item : late) user_lane_.enqueue(std::move(item));
  schedule_.fail_all();
  user_lane_.fail_all(error);
  scheduled_lane_.fail_all(error);
  messenger_.fail_all(error);
  group_.bell->ring_all();
  engine_->wake_io_loop();
}

}  // namespace syncengine
