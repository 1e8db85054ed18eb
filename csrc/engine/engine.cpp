#include "engine/engine.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/futex.h"
#include "base/resources.h"
#include "transport/shm/liveness.h"

namespace syncengine {

namespace {

constexpr auto kSpin = std::chrono::microseconds(
    200);  // longer than a wake-up takes (60 us in a virtual machine), or ranks keep missing each other
constexpr auto kGrace = std::chrono::milliseconds(10);  // how long a lazy thread leaves new work to the others
constexpr int kCarryPasses = 64;                        // of one carry_on(): bounds how long bytes may lie unread
constexpr int kPokePasses = 4;                          // of one poke: bounds how long a hook may take
constexpr auto kPatience = std::chrono::seconds(5);     // with threads that drop what operations held
constexpr auto kTick = std::chrono::milliseconds(50);   // how late a death, an abort or Ctrl-C may be noticed

// A short busy wait. Where each rank has a core it mostly pauses, and now and then offers the core: the scheduler may have put
// a peer on the same one. Where ranks share cores it always does.
class Spin {
 public:
  explicit Spin(bool cores_to_spare) : cores_to_spare_(cores_to_spare) {}

  bool again() {
    if (count_++ == 0) until_ = Deadline::after(kSpin);
    if (cores_to_spare_ && count_ % 16 != 0) {
      cpu_pause();
      return true;
    }
    sched_yield();
    return !until_.passed();
  }
  void reset() { count_ = 0; }

 private:
  bool cores_to_spare_;
  unsigned count_ = 0;
  Deadline until_ = Deadline::never();
};

// Whether it is time to look around again, for loops that make progress and so never come to rest.
class Tick {
 public:
  bool due() {
    if (++count_ % 64 != 0) return false;  // seldom enough that the clock costs nothing
    if (count_ == 64) next_ = Deadline::after(kTick);
    if (!next_.passed()) return false;
    next_ = Deadline::after(kTick);
    return true;
  }

 private:
  unsigned count_ = 0;
  Deadline next_ = Deadline::never();
};

}  // namespace

Engine::Engine(std::shared_ptr<shm::Arena> arena, int most_watchers, Options options, CountCallers count_callers)
    : arena_(std::move(arena)), watchers_(most_watchers), options_(options), count_callers_(std::move(count_callers)) {
  shm::prepare_liveness(arena_->header());
  thread_ = std::thread(&Engine::thread_main, this);
  // No peer may look for signs of life before the thread gives them.
  while (thread_word_.load(std::memory_order_acquire) == 0) futex_wait(thread_word_, 0, kTick);
}

Engine::~Engine() {
  if (gradient_pool_ != nullptr) gradient_pool_->close();
  if (arena_->forked()) {
    thread_.detach();  // it runs in the parent only
    return;
  }
  stop_.store(true, std::memory_order_seq_cst);
  wake_thread();
  if (bell_) bell_->ring_self();
  thread_.join();
}

void Engine::attach(std::vector<std::unique_ptr<shm::PeerArena>> peers, int local_rank, std::vector<int> names) {
  peers_ = std::move(peers);
  local_rank_ = local_rank;
  names_ = std::move(names);
  int local_size = static_cast<int>(peers_.size());
  std::vector<shm::Doorbell*> doorbells;
  std::vector<shm::WaitBoard*> boards;
  for (auto& peer : peers_) {
    shm::ArenaHeader& header = peer ? peer->header() : arena_->header();
    doorbells.push_back(&header.doorbell);
    boards.push_back(&header.board);
  }
  standstill_ = std::make_unique<Standstill>(std::move(boards), local_rank_);
  bell_ = std::make_unique<Bell>(std::move(doorbells), local_rank_);
  cores_to_spare_ = available_cores() >= local_size;
  lazy_ = available_cores() < 2 * local_size;
}

void Engine::expect_io_thread() {
  io_thread_ = true;
  cores_to_spare_ = available_cores() >= 2 * static_cast<int>(peers_.size());
}

shm::Pool* Engine::gradient_pool() {
  if (options_.gradient_memory != GradientMemory::Arena) return nullptr;
  Locked lock(*this);
  if (gradient_pool_ == nullptr) gradient_pool_ = arena_->create_pool();
  return gradient_pool_;
}

void Engine::add(Movable* movable) {
  Locked lock(*this);
  movables_.push_back(movable);
}

void Engine::remove(Movable* movable) {
  Locked lock(*this);
  std::erase(movables_, movable);
}

bool Engine::pass() {
  bool moved = false;
  {
    Locked lock(*this);
    for (Movable* movable : movables_) moved |= movable->advance();
    if (moved) wake_carrier();
  }
  // Another thread of this rank may sleep for what this pass did, or with an interest that it changed.
  if (moved && bell_->anybody_listens()) bell_->ring_self();
  return moved;
}

void Engine::poke(Movable& owner) {
  bool moved = false;
  pokes_.fetch_add(1, std::memory_order_relaxed);
  if (Locked lock(*this, std::try_to_lock); lock) {
    bool again = true;
    for (int passes = 0; again && passes < (lazy_ ? kPokePasses : 1); ++passes) {
      again = false;
      for (Movable* movable : movables_) again |= movable->advance();
      moved |= again;
    }
    if (moved) wake_carrier();
  } else {
    moved = true;  // the pass in progress may have looked too early
  }
  if (bell_->anybody_listens()) {
    if (moved) bell_->ring_self();
  } else {
    wake_thread();
  }
  if (Carrier* carrier = owner.carrier()) carrier->come();
}

// Once for all that has come: what is sent on should not wait for more of it.
bool Engine::carry_on() {
  bool ended = false, moved = true, any = false;
  pokes_.fetch_add(1, std::memory_order_relaxed);
  {
    Locked lock(*this);
    uint64_t before = tally_.ended.load(std::memory_order_relaxed);  // relaxed: works end under the lock
    for (int passes = 0; moved && passes < kCarryPasses; ++passes) {
      if (bell_->anybody_listens()) bell_->listen_for(interest());  // to what the sleepers need now
      moved = false;
      for (Movable* movable : movables_) moved |= movable->advance();
      any |= moved;
    }
    ended = tally_.ended.load(std::memory_order_relaxed) != before;
    if (moved || ended) wake_carrier();
  }
  if ((moved || ended) && bell_->anybody_listens()) bell_->ring_self();
  return any;
}

uint64_t Engine::interest() const {
  uint64_t ranks = 0;
  for (Movable* movable : movables_) ranks |= movable->interest();
  return ranks;
}

void Engine::rest(Duration at_most, const std::function<bool()>& over, Carrier* carrier) {
  uint32_t ticket = 0;
  bool moved = false;
  {
    // One critical section: a thread that changes what this one waits for does so before, and is seen, or after, and rings.
    Locked lock(*this);
    ticket = bell_->listen(interest());
    for (Movable* movable : movables_) moved |= movable->advance();
    if (carrier) asleep_ = carrier;
  }
  if (!moved && !over()) {
    if (carrier) {
      carrier->carry(at_most);
    } else {
      sleeps_.fetch_add(1, std::memory_order_relaxed);
      bell_->sleep(ticket, at_most);
    }
  }
  locked([&] {
    bell_->stop_listening();
    if (carrier) asleep_ = nullptr;
  });
  if (moved && bell_->anybody_listens()) bell_->ring_self();
}

// Moves the bytes between hosts itself, until `work` has ended or for a tick: then it looks around and may wait for Python's lock,
// and must not be needed meanwhile. False: another thread does.
bool Engine::carry(const Work& work, Carrier& carrier, const std::function<bool()>& spin_again) {
  if (!carrier.claim()) return false;
  struct Claim {
    Carrier& carrier;
    ~Claim() { carrier.release(); }
  } claim{carrier};
  Deadline tick = Deadline::after(kTick);
  while (!work.ended() && !tick.passed()) {
    bool moved = carry_on();
    if (work.ended()) break;
    moved |= carrier.carry(Duration::zero());
    if (!moved && !spin_again()) rest(tick.left(kTick), [&] { return work.ended(); }, &carrier);
  }
  return true;
}

void Engine::wait(const Work& work, Movable& owner, const std::function<void()>& interrupted, bool gives_up) {
  throw_if_forked();
  struct Waiter {
    Engine& engine;
    Sleeper sleeper;
    Carrier* carrier;
    bool sleeps = false;
    Waiter(Engine& e, Sleeper s, Carrier* c) : engine(e), sleeper(s), carrier(c) {
      engine.waiters_.fetch_add(1, std::memory_order_seq_cst);
    }
    // From now on the peers hear of it. Before the thread goes on they must hear that it does.
    void sleep() {
      int callers = engine.count_callers_ ? engine.count_callers_() : kUnknownCallers;
      engine.locked([&] {
        sleeper.callers = callers;
        if (!std::exchange(sleeps, true)) engine.sleepers_.push_back(&sleeper);
      });
    }
    ~Waiter() {
      if (sleeps) {
        engine.locked([&] {
          std::erase(engine.sleepers_, &sleeper);
          engine.publish_waits();
        });
      }
      engine.waiters_.fetch_sub(1, std::memory_order_seq_cst);
      if (engine.tally_.outstanding.load(std::memory_order_seq_cst) == 0) return;
      engine.wake_thread();
      if (carrier) carrier->come();
    }
  } waiter(*this, {work, owner, gives_up}, owner.carrier());
  Spin spin(cores_to_spare_);
  Tick tick;
  std::optional<Deadline> settled;  // most waits end before that
  while (!work.ended()) {
    bool carried = waiter.carrier && carry(work, *waiter.carrier, [&] { return spin.again(); });
    bool moved = !carried && pass();
    // Who waits for other hosts alone spins once; then its core is for the thread that moves bytes.
    if (moved && !(io_thread_ && locked([this] { return interest() == 0; }))) spin.reset();
    if (carried && work.ended()) break;
    bool idle = !carried && !moved && !work.ended() && !spin.again();
    if (!carried && !idle && !tick.due()) continue;
    if (idle && !settled) settled = Deadline::after(kTick);
    if (carried || (idle && settled->passed())) waiter.sleep();
    look_around();
    if (idle && !work.ended()) rest(kTick, [&] { return work.ended(); });
    if (interrupted) interrupted();
  }
}

void Engine::await_drops() {
  auto deadline = Deadline::after(kPatience);  // one of them may be the caller: a finalizer that closes a communicator
  while (droppers_.load(std::memory_order_acquire) > 0 && !deadline.passed())  // acquire: after what they did
    std::this_thread::sleep_for(std::chrono::microseconds(100));
}

void Engine::wake_thread() {
  if (!thread_parked_.load(std::memory_order_seq_cst)) return;
  thread_word_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake_all(thread_word_);
}

void Engine::thread_main() {
  sigset_t all;
  sigfillset(&all);
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT})
    sigdelset(&all, fault);                     // but its own faults are its own
  pthread_sigmask(SIG_SETMASK, &all, nullptr);  // signals belong to the program's own threads
  pthread_setname_np(pthread_self(), "syncengine");
  shm::hold_all(arena_->header(), watchers_);
  thread_word_.fetch_add(1, std::memory_order_release);
  futex_wake_all(thread_word_);
  Tick tick;
  uint64_t pokes_seen = 0;
  while (!stop_.load(std::memory_order_seq_cst)) {
    uint32_t ticket = thread_word_.load(std::memory_order_seq_cst);
    thread_parked_.store(true, std::memory_order_seq_cst);
    bool needed =
        tally_.outstanding.load(std::memory_order_seq_cst) > 0 && waiters_.load(std::memory_order_seq_cst) == 0;
    if (!needed) {
      if (!stop_.load(std::memory_order_seq_cst)) futex_wait(thread_word_, ticket, std::chrono::hours(1));
      continue;
    }
    thread_parked_.store(false, std::memory_order_seq_cst);
    if (uint64_t pokes = pokes_.load(std::memory_order_relaxed); lazy_ && pokes != pokes_seen) {
      pokes_seen = pokes;
      futex_wait(thread_word_, ticket, kGrace);
      continue;
    }
    if (pass() && !tick.due()) continue;
    look_around();
    rest(kTick, [this] { return stop_.load(std::memory_order_seq_cst); });
  }
  shm::release_all(arena_->header(), watchers_);
}

void Engine::sever_tensors(const std::vector<ArenaRange>& ranges, const Error& cause) {
  if (ranges.empty()) return;
  for (auto [offset, bytes] : ranges) arena_->sever_tensor(offset, bytes);
  for (Movable* movable : movables_) movable->lose_direct_memory(cause);
}

void Engine::throw_if_forked() const {
  if (arena_->forked())
    throw Error(ErrorKind::InvalidUsage,
                "syncengine can't be used in a forked child (a DataLoader worker, say): make "
                "collective calls in the process that called syncengine.init()");
}

}  // namespace syncengine
