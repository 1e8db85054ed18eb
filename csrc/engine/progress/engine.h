// One rank's engine: its arena, its thread, and the loop that moves all its communicators.
//
// Progress is made by whichever thread has time. A thread that waits drives the loop itself; the engine's thread drives
// it while asynchronous work is outstanding and nobody waits. If the ranks' own threads take all cores, the engine's
// thread leaves the work to them as long as they come by now and then: they have the data in their caches, and need no
// switch. All protocol state is touched under one lock, held for a bounded number of passes.
//
// Ownership: communicators share it; it owns the arenas' mappings and joins its thread when the last one goes.
// Thread-safety: any thread. Failure: wait() rethrows the work's error. All calls of a forked child throw
// InvalidUsage.
#pragma once

#include <atomic>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/say.h"
#include "base/sync_point.h"
#include "base/thread.h"
#include "engine/progress/bell.h"
#include "engine/progress/deadlock_detector.h"
#include "engine/progress/driver.h"
#include "engine/progress/group.h"
#include "engine/progress/options.h"
#include "engine/progress/work.h"
#include "transport/shm/arena.h"

namespace syncengine {

// The lock of an engine's state, held for a bounded number of passes of its progress. unlock() frees it first, and then
// gives log() to stderr and drops trash(), since dropping a tensor's last reference may wait for Python's lock.
//
// Thread-safety: any thread; trash() and log() by the one that holds it. Failure: none.

class ProgressLock {
 public:
  using Trash = std::vector<std::shared_ptr<void>>;

  void lock() { mutex_.lock(); }
  bool try_lock() { return mutex_.try_lock(); }
  void unlock() {
    if (trash_.empty() && log_.empty()) return mutex_.unlock();  // after nearly every pass
    Trash trash = std::exchange(trash_, {});
    std::string log = std::exchange(log_, {});
    const bool drops = !trash.empty();
    if (drops) droppers_.fetch_add(1, std::memory_order_relaxed);  // relaxed: under the lock
    mutex_.unlock();
    if (!log.empty()) say(std::move(log));
    if (!drops) return;
    sync_point("dropping");
    trash.clear();
    droppers_.fetch_sub(1, std::memory_order_release);  // release: what it did is done
  }

  Trash& trash() { return trash_; }
  void log(const std::string& line) { log_ += "syncengine: " + line + "\n"; }

  // Waits, but not for ever, for threads that still drop what ended operations held. Called without Python's lock,
  // before the interpreter ends: a thread that asked for Python's lock later would be ended, and the process with it.
  void await_drops() const {
    auto deadline = Deadline::after(std::chrono::seconds(5));  // one of them may be the caller: a finalizer
    while (droppers_.load(std::memory_order_acquire) > 0 && !deadline.passed())  // acquire: after what they did
      std::this_thread::sleep_for(std::chrono::microseconds(100));
  }

 private:
  std::mutex mutex_;
  Trash trash_;  // references that ended operations held
  std::string log_;
  std::atomic<int> droppers_{0};
};

// An object that the engine's loop advances, such as a Membership. Calls come under the progress lock unless noted.
class Progressable {
 public:
  virtual ~Progressable() = default;
  virtual bool advance() = 0;
  virtual uint64_t interest() const { return 0; }  // local ranks whose next step is needed
  virtual void check_health() {}  // deaths, failures, deadlines: about every 50 ms while something waits
  virtual void lose_direct_memory(const Error& /*cause*/) {}  // some of the arena was severed
  virtual void fail(ErrorKind, const std::string& /*text*/) {}
  virtual void leave() {}
  virtual IoLoop* io_loop() { return nullptr; }  // for a thread that waits; called without any lock

  // Methods for the deadlock detector, which names members by their local ranks.
  virtual DeadlockDetector::Wait wait_of(const Work&) const { return {}; }
  virtual bool has_block(int /*local_rank*/, uint64_t /*offset*/) const { return false; }
  virtual std::string describe_wait(const Work&) const { return ""; }
};

// The list of all progressables of an engine, guarded by the progress lock. Each adds and removes itself.
class Progressables {
 public:
  void add(Progressable* progressable) { all_.push_back(progressable); }
  void remove(Progressable* progressable) { std::erase(all_, progressable); }
  auto begin() const { return all_.begin(); }
  auto end() const { return all_.end(); }

  bool advance() {
    bool moved = false;
    for (Progressable* progressable : all_) moved |= progressable->advance();
    return moved;
  }
  uint64_t interest() const {
    uint64_t ranks = 0;
    for (Progressable* progressable : all_) ranks |= progressable->interest();
    return ranks;
  }
  void check_health() {
    const auto all = all_;  // a failure may reach others
    for (Progressable* progressable : all) progressable->check_health();
  }

 private:
  std::vector<Progressable*> all_;
};

// Returns how many threads of this process might call the engine: there can be a deadlock only if all of them wait.
// Called by a thread that waits. The answer is kUnknownCallers if that thread is not counted itself.
using CountCallers = std::function<int()>;
inline constexpr int kUnknownCallers = std::numeric_limits<int>::max();

// Lists the threads of this rank that have waited for a while. Tells the peers what each of them waits for, and ends
// waits of ranks that wait for each other.
//
// Ownership: its parts outlive it. Thread-safety: under the engine's progress lock. Failure: none.
class Sleepers {
 public:
  struct Thread {
    const Work& work;
    const Progressable& owner;
    bool gives_up;
    int callers = kUnknownCallers;  // as counted by this thread
  };

  explicit Sleepers(const LocalRanks& locals)
      : locals_(locals), detector_(locals.each(&shm::ArenaHeader::board), locals.me()) {}

  void add(const Thread* thread) { threads_.push_back(thread); }  // peers see it at the next check
  void remove(const Thread* thread) {                             // peers see it at once
    std::erase(threads_, thread);
    publish();
  }
  // Publishes the waits, and ends a deadlock if there is one. Called about every 50 ms, after all.check_health().
  void check(const Progressables& all) {
    publish();
    if (uint64_t stuck = detector_.search()) end_deadlock(stuck, all);
  }

  // Returns "rank 1 waits in its collective call number 2 for rank 0", for those of `local_ranks` that wait for this
  // rank; empty if none does. Says so where a wait is in another communicator than `beside`.
  std::string who_waits_for_me(uint64_t local_ranks, const Progressable& beside) const;

 private:
  void publish();
  void end_deadlock(uint64_t stuck, const Progressables& all);

  const LocalRanks& locals_;
  std::vector<const Thread*> threads_;
  DeadlockDetector detector_;
};

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  // At most `most_watchers` ranks will share this host, and watch whether this process lives.
  Engine(std::shared_ptr<shm::Arena> arena, int most_watchers, Options options, CountCallers count_callers = {});
  ~Engine();
  // Destroys `engine`. Any thread may call this, even the engine's own.
  static void destroy(Engine* engine) { delete_off(engine->thread_, engine); }

  // Connects the engine with its host's other ranks: see LocalRanks. Called once, before any communicator exists.
  void attach(std::vector<std::unique_ptr<shm::PeerArena>> peers, int local_rank, std::vector<int> names,
              std::map<int, ProcessWatch> watches);

  // Says that another thread of this process will move bytes between hosts, and call progress(). A thread that waits
  // only for other hosts then sleeps, and is woken when something has ended.
  void expect_io_thread();

  const Options& options() const { return options_; }
  const std::shared_ptr<shm::Arena>& arena() const { return arena_; }
  LocalRanks& locals() { return *locals_; }
  Bell& bell() { return *bell_; }
  shm::Pool* gradient_pool();  // null if gradients are not to lie in the arena

  ProgressLock& lock() { return lock_; }
  template <class Change>
  auto locked(Change&& change) {
    std::lock_guard held(lock_);
    return change();
  }

  // Makes one pass now, unless another thread is making one, and wakes the engine's thread for the rest. Called after
  // asynchronous work has been submitted.
  void poke(Progressable& owner);
  // Called by the thread that moves bytes: does what new bytes allow, in the place of threads that sleep. Returns
  // whether anything was done.
  bool progress();
  // Drives the loop until `work` of `owner` has ended. `gives_up`: `interrupted` will end the wait: it's no deadlock.
  void wait(const Work& work, Progressable& owner, const std::function<void()>& interrupted, bool gives_up);

  Work::Tally& tally() { return tally_; }

  // The methods from here to sever_tensors() need the progress lock.
  Progressables& progressables() { return progressables_; }
  const Sleepers& sleepers() const { return *sleepers_; }
  void wake_io_loop() {
    if (asleep_) asleep_->wake();
  }
  // Severs the ranges whose `apart` is set. A peer that still reads another range notices afterwards that this rank has
  // failed. Throws an error of Arena::sever_tensor, but only after all ranges have been tried.
  void sever_tensors(const std::vector<ArenaRange>& ranges, const Error& cause);

  uint64_t sleeps() const { return sleeps_.load(std::memory_order_relaxed); }
  void throw_if_forked() const;
  void throw_if_unusable() const;  // for new objects: also throws if a peer may write to this process's memory

 private:
  void thread_main(std::promise<void> begun);
  bool pass();
  // Sleeps, unless something moves or `over()` is true; with an I/O loop, sleeps in it.
  void rest(Duration at_most, const std::function<bool()>& over, IoLoop* io_loop = nullptr);
  bool drive_io(const Work& work, IoLoop& io_loop, const std::function<bool()>& spin_again);
  void check_health();

  std::shared_ptr<shm::Arena> arena_;
  int watchers_;  // ranks that may watch whether this process lives
  Options options_;
  CountCallers count_callers_;
  std::optional<LocalRanks> locals_;
  std::unique_ptr<Bell> bell_;
  shm::Pool* gradient_pool_ = nullptr;  // made on demand; under lock_
  bool lazy_ = false;                   // there are no cores for the engines' threads
  bool cores_to_spare_ = false;         // there are enough for every rank's waiting thread to spin
  bool io_thread_ = false;

  ProgressLock lock_;
  Progressables progressables_;
  std::optional<Sleepers> sleepers_;
  IoLoop* asleep_ = nullptr;  // the loop in which a waiting thread sleeps

  Work::Tally tally_;
  std::atomic<uint64_t> sleeps_{0};
  Driver driver_{Driver::Kind::Handed, [this] { return tally_.outstanding.load(std::memory_order_seq_cst) > 0; }};
  std::thread thread_;
};

}  // namespace syncengine
