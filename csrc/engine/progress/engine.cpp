#include "engine/progress/engine.h"

#include <algorithm>

#include "base/resources.h"

namespace syncengine {

Engine::Engine(std::shared_ptr<shm::Arena> arena, int most_watchers, Options options, CountCallers count_callers)
    : arena_(std::move(arena)), watchers_(most_watchers), options_(options), count_callers_(std::move(count_callers)) {
  shm::prepare_liveness(arena_->header());
  std::promise<void> begun;
  auto has_begun = begun.get_future();
  thread_ = start_thread(&Engine::thread_main, this, std::move(begun));
  has_begun.wait();  // peers look for signs of life only after the thread has begun to give them
}

Engine::~Engine() {
  if (gradient_pool_ != nullptr) gradient_pool_->close();
  if (arena_->forked()) {
    thread_.detach();  // a fork's child has no such thread to join
    return;
  }
  driver_.stop();
  if (bell_) bell_->ring_self();
  thread_.join();
}

void Engine::attach(std::vector<std::unique_ptr<shm::PeerArena>> peers, int local_rank, std::vector<int> names,
                    std::map<int, ProcessWatch> watches) {
  locals_.emplace(arena_->header(), std::move(peers), local_rank, std::move(names), std::move(watches));
  sleepers_.emplace(*locals_);
  bell_ = std::make_unique<Bell>(locals_->each(&shm::ArenaHeader::doorbell), local_rank);
  cores_to_spare_ = available_cores() >= locals_->size();
  lazy_ = available_cores() < 2 * locals_->size();
  if (!lazy_) driver_.ignore_visits();
}

void Engine::expect_io_thread() {
  io_thread_ = true;
  cores_to_spare_ = available_cores() >= 2 * locals_->size();
}

shm::Pool* Engine::gradient_pool() {
  if (options_.gradient_memory != GradientMemory::Arena) return nullptr;
  std::lock_guard lock(lock_);
  if (gradient_pool_ == nullptr) gradient_pool_ = arena_->create_pool();
  return gradient_pool_;
}

bool Engine::pass() {
  bool moved = false;
  {
    std::lock_guard lock(lock_);
    moved = progressables_.advance();
    if (moved) wake_io_loop();
  }
  // A thread of this rank may sleep for what this pass has done, or with an interest that it has changed: wake it.
  if (moved && bell_->anybody_listens()) bell_->ring_self();
  return moved;
}

void Engine::poke(Progressable& owner) {
  bool moved = false;
  driver_.visit();
  if (std::unique_lock lock(lock_, std::try_to_lock); lock) {
    int passes = lazy_ ? 4 : 1;  // limits how long a hook may take
    while (passes-- > 0 && progressables_.advance()) moved = true;
    if (moved) wake_io_loop();
  } else {
    moved = true;  // the pass in progress may have looked too early
  }
  if (bell_->anybody_listens()) {
    if (moved) bell_->ring_self();
  } else {
    driver_.call();
  }
  if (IoLoop* io_loop = owner.io_loop()) io_loop->notify();
}

// Makes passes until nothing moves, so that all that the bytes have made possible is sent on before more are awaited.
bool Engine::progress() {
  constexpr int kMostPasses = 64;  // limits how long bytes may lie unread
  bool ended = false, moved = true, any = false;
  driver_.visit();
  {
    std::lock_guard lock(lock_);
    uint64_t before = tally_.ended.load(std::memory_order_relaxed);  // relaxed: works end under the lock
    for (int passes = 0; moved && passes < kMostPasses; ++passes) {
      if (bell_->anybody_listens()) bell_->listen_for(progressables_.interest());  // the sleepers' needs have changed
      moved = progressables_.advance();
      any |= moved;
    }
    ended = tally_.ended.load(std::memory_order_relaxed) != before;
    if (moved || ended) wake_io_loop();
  }
  if ((moved || ended) && bell_->anybody_listens()) bell_->ring_self();
  return any;
}

void Engine::sever_tensors(const std::vector<ArenaRange>& ranges, const Error& cause) {
  if (std::ranges::none_of(ranges, &ArenaRange::apart)) return;
  std::exception_ptr refused;
  for (const ArenaRange& range : ranges) {
    if (!range.apart) continue;
    try {
      arena_->sever_tensor(range.offset, range.bytes, range.readers);
    } catch (const Error&) {
      refused = std::current_exception();
    }
  }
  for (Progressable* progressable : progressables_) progressable->lose_direct_memory(cause);
  if (refused) std::rethrow_exception(refused);
}

void Engine::throw_if_unusable() const {
  throw_if_forked();
  shm::throw_if_exposed();
}

void Engine::throw_if_forked() const {
  if (arena_->forked())
    throw Error(ErrorKind::InvalidUsage,
                "syncengine can't be used in a forked child (a DataLoader worker, say): make "
                "collective calls in the process that called syncengine.init()");
}

}  // namespace syncengine
