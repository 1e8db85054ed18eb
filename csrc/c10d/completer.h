// The threads that complete futures. Their callbacks may run Python, wait for the GIL, make calls, or wait for other
// futures, none of which the engine's own thread may do; and they drive the engine while they wait, as every thread
// does.
//
// One thread at a time has the turn: it waits for a work, then runs its future's callbacks, so that these run one after
// another. A callback that blocks must not keep other futures from completing: the turn passes to another thread when
// the callback requests a future itself, or has not returned within kPatience. So there are at most as many threads as
// callbacks have blocked at one time, plus two: one that has the turn, and one that watches it.
//
// Ownership: shared by the backend, its works and the threads, which begin with the first future, and end after stop().
// Thread-safety: any thread. Failure: a work's error goes to its future.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/deadline.h"

namespace syncengine {

class TorchWork;

class Completer : public std::enable_shared_from_this<Completer> {
 public:
  enum class Order {
    AsAdded,  // collectives end in the order of their calls: waits for the first
    AsEnded,  // messages don't: looks at all of them, every millisecond while there are any
  };
  explicit Completer(Order order) : order_(order) {}

  // Completes its future once it has ended. If a callback of a future calls this, it is taken to wait for another one
  // next.
  void add(c10::intrusive_ptr<TorchWork> work);

  // After all works have ended, well or not; without the GIL. To be called once at least, or the threads stay.
  void stop();

 private:
  using Lock = std::unique_lock<std::mutex>;
  static constexpr std::chrono::milliseconds kPatience{10};

  void run();
  bool take_turn(Lock& lock);
  c10::intrusive_ptr<TorchWork> next(Lock& lock);
  void keep_deadlines();
  void call_another();
  void pass_turn_on();

  Order order_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<TorchWork>> works_;
  bool stopped_ = false;
  std::vector<std::thread> threads_;
  size_t idle_ = 0;            // threads that wait for the turn
  bool watched_ = false;       // one of them looks whether callbacks return
  uint64_t turns_ = 0;         // taken so far; the last one is
  bool taken_ = false;         // still held
  bool in_callbacks_ = false;  // by a thread that runs callbacks,
  Clock::time_point since_{};  // since then
};

}  // namespace syncengine
