// The waits of a rank's threads: of the program's in wait(), of the engine's own in thread_main(). See docs/threads.md.

#include <sched.h>

#include <algorithm>
#include <bit>
#include <optional>
#include <utility>

#include "base/phase_clock.h"
#include "base/sync_point.h"
#include "base/thread.h"
#include "base/trace.h"
#include "engine/progress/engine.h"

namespace syncengine {

namespace {

constexpr auto kSpin = std::chrono::microseconds(
    200);  // longer than a wake-up takes (60 us in a virtual machine), or ranks keep missing each other
constexpr auto kTick = std::chrono::milliseconds(50);  // how late a death, an abort or Ctrl-C may be noticed

// A short busy wait. If each rank has a core of its own, it mostly pauses, and now and then yields: the scheduler may
// have put a peer on the same core. If ranks share cores, it always yields.
struct Spin {
  bool cores_to_spare;
  unsigned count = 0;
  Clock::time_point last = {}, until = {};

  bool again() {
    if (count++ == 0) until = (last = Clock::now()) + kSpin;
    if (cores_to_spare && count % 16 != 0) {
      cpu_pause();
      return true;
    }
    sched_yield();
    const auto now = Clock::now();
    waited_here() += (now - std::exchange(last, now)).count();
    return now < until;
  }
};

// Says when about 50 ms have passed, in loops that make progress and so never sleep: peers must be checked again.
struct Tick {
  unsigned count = 0;
  Deadline next = Deadline::never();

  bool due() {
    if (++count % 64 != 0) return false;  // seldom enough that the clock costs nothing
    if (count == 64) next = Deadline::after(kTick);
    if (!next.passed()) return false;
    next = Deadline::after(kTick);
    return true;
  }
};

std::string describe(int local_rank, const DeadlockDetector::Wait& wait, const Progressable& beside) {
  std::string number = std::to_string(wait.place.number);
  std::string text = wait.place.lane == shm::kUserLane ? "its collective call number " + number
                                                       : "a gradient bucket (number " + number + ")";
  return beside.has_block(local_rank, wait.group) ? text : text + " of another communicator";
}

}  // namespace

void Engine::rest(Duration at_most, const std::function<bool()>& over, IoLoop* io_loop) {
  uint32_t ticket = 0;
  bool moved = false;
  {
    // Listening and looking are one critical section: a thread that changes what this one waits for does so either
    // before, and is seen, or after, and rings.
    std::lock_guard lock(lock_);
    ticket = bell_->listen(progressables_.interest());
    moved = progressables_.advance();
    if (io_loop) asleep_ = io_loop;
  }
  if (!moved && !over()) {
    const auto since = Clock::now();
    if (io_loop) {
      io_loop->poll(at_most);
    } else {
      sleeps_.fetch_add(1, std::memory_order_relaxed);
      bell_->sleep(ticket, at_most);
    }
    waited_here() += (Clock::now() - since).count();
  }
  locked([&] {
    bell_->stop_listening();
    if (io_loop) asleep_ = nullptr;
  });
  if (moved && bell_->anybody_listens()) bell_->ring_self();
}

// Lets this thread move the bytes between hosts, until `work` has ended or for 50 ms. Then it gives way to others,
// since it checks peers and may wait for Python's lock. Returns false if another thread moves the bytes.
bool Engine::drive_io(const Work& work, IoLoop& io_loop, const std::function<bool()>& spin_again) {
  if (!io_loop.claim()) return false;
  struct Claim {
    IoLoop& io_loop;
    ~Claim() { io_loop.release(); }
  } claim{io_loop};
  Deadline tick = Deadline::after(kTick);
  while (!work.ended() && !tick.passed()) {
    bool moved = progress();
    if (work.ended()) break;
    moved |= io_loop.poll(Duration::zero());
    if (!moved && !spin_again()) rest(tick.left(kTick), [&] { return work.ended(); }, &io_loop);
  }
  return true;
}

void Engine::wait(const Work& work, Progressable& owner, const std::function<void()>& interrupted, bool gives_up) {
  throw_if_forked();
  struct Waiter {
    Engine& engine;
    Sleepers::Thread thread;
    IoLoop* io_loop;
    bool sleeps = false;
    Waiter(Engine& e, Sleepers::Thread t, IoLoop* c) : engine(e), thread(t), io_loop(c) { engine.driver_.enter(); }
    // Tells the peers of this thread's wait. The destructor tells them of its end, before the thread goes on.
    void sleep() {
      int callers = engine.count_callers_ ? engine.count_callers_() : kUnknownCallers;
      engine.locked([&] {
        thread.callers = callers;
        if (!std::exchange(sleeps, true)) engine.sleepers_->add(&thread);
      });
    }
    // Stops driving. Returns whether there is work left for other threads.
    bool leave() {
      engine.driver_.leave();
      if (engine.tally_.outstanding.load(std::memory_order_seq_cst) == 0) return false;
      engine.driver_.call();
      return true;
    }
    ~Waiter() {
      if (sleeps) engine.locked([&] { engine.sleepers_->remove(&thread); });
      if (leave() && io_loop) io_loop->notify();
    }
  } waiter(*this, {work, owner, gives_up}, owner.io_loop());
  // While this thread may wait for Python's lock, which other code may hold for long, the engine's own thread drives.
  struct Aside {
    Waiter& waiter;
    explicit Aside(Waiter& w) : waiter(w) { waiter.leave(); }
    ~Aside() { waiter.engine.driver_.enter(); }
  };
  struct TracedWait {
    int64_t begin = 0, waited = 0;
    uint64_t ranks = 0;  // local ranks that have not made this call when it begins
    TracedWait(Engine& engine, const Work& work, const Progressable& owner) {
      if (!trace::is_on() || work.ended()) return;
      uint64_t locals = engine.locked([&] { return owner.wait_of(work).missing; });
      for (; locals != 0; locals &= locals - 1) {
        const int rank = engine.locals_->in_job(std::countr_zero(locals));
        if (rank < 64) ranks |= uint64_t{1} << rank;  // an event has a bit for each of them, and names no others
      }
      waited = waited_here();
      begin = trace::now();
    }
    ~TracedWait() {
      if (begin == 0 || waited_here() == waited) return;
      trace::record({.kind = trace::Kind::Wait, .begin = begin, .end = trace::now(), .detail = ranks});
    }
  };
  const TracedWait traced(*this, work, owner);
  Spin spin{cores_to_spare_};
  Tick tick;
  std::optional<Deadline> next_look;  // for signals, and for other ranks' waits; most waits end before
  while (!work.ended()) {
    bool drove_io = waiter.io_loop && drive_io(work, *waiter.io_loop, [&] { return spin.again(); });
    bool moved = !drove_io && pass();
    // A thread that waits only for other hosts spins once; then its core is for the thread that moves bytes.
    if (moved && !(io_thread_ && locked([this] { return progressables_.interest() == 0; }))) spin.count = 0;
    if (drove_io && work.ended()) break;
    bool idle = !drove_io && !moved && !work.ended() && !spin.again();
    if (!drove_io && !idle && !tick.due()) continue;
    if (!next_look) next_look = Deadline::after(drove_io || !idle ? Duration::zero() : kTick);
    if (next_look->passed()) {
      Aside aside(waiter);
      if (idle || drove_io) waiter.sleep();
      if (interrupted) interrupted();
      next_look = Deadline::after(kTick);
    }
    check_health();
    if (idle && !work.ended()) rest(next_look->left(kTick), [&] { return work.ended(); });
  }
}

void Engine::thread_main(std::promise<void> begun) {
  begin_thread("syncengine");
  shm::hold_all(arena_->header(), watchers_);
  begun.set_value();
  for (Tick tick; driver_.await_turn();) {
    if (pass() && !tick.due()) continue;
    check_health();
    rest(kTick, [this] { return driver_.is_stopped(); });
  }
  shm::release_all(arena_->header(), watchers_);
}

void Engine::check_health() {
  sync_point("looking");
  std::lock_guard lock(lock_);
  progressables_.check_health();
  sleepers_->check(progressables_);
}

void Sleepers::publish() {
  std::vector<DeadlockDetector::Wait> waits;
  // If no thread here has counted more threads that may make calls than wait here now, all such threads wait here: the
  // last one counted while all others waited, so nobody was left to start another thread.
  bool everybody = true;
  for (const Thread* thread : threads_) {
    waits.push_back(thread->owner.wait_of(thread->work));
    everybody &= static_cast<size_t>(thread->callers) <= threads_.size() && !thread->gives_up;
  }
  detector_.publish(waits, everybody);
}

// Each rank that finds the deadlock fails the communicators in which it waits, or in which stuck ranks wait for it.
void Sleepers::end_deadlock(uint64_t stuck, const Progressables& all) {
  const Thread& first = *threads_.front();
  std::string text;
  for (const auto& link : detector_.chain(stuck)) {
    text += text.empty() ? locals_.name(link.rank) + " waits in " + first.owner.describe_wait(first.work)
                         : ", which waits in " + describe(link.rank, link.wait, first.owner);
    text += " for " + locals_.name(link.next);
  }
  text += ": the ranks make different calls";
  std::vector<Progressable*> failing;
  for (Progressable* progressable : all) {
    bool mine = std::any_of(threads_.begin(), threads_.end(), [&](auto* t) { return &t->owner == progressable; });
    for (const auto& [rank, wait] : detector_.waits_for_me(stuck)) mine |= progressable->has_block(rank, wait.group);
    if (mine) failing.push_back(progressable);
  }
  for (Progressable* progressable : failing) progressable->fail(ErrorKind::Mismatch, text);
}

std::string Sleepers::who_waits_for_me(uint64_t local_ranks, const Progressable& beside) const {
  std::string text;
  for (const auto& [rank, wait] : detector_.waits_for_me(local_ranks))
    text += (text.empty() ? "" : ", ") + locals_.name(rank) + " waits in " + describe(rank, wait, beside) + " for " +
            locals_.name(locals_.me());
  return text;
}

}  // namespace syncengine
