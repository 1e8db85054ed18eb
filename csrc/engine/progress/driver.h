// Decides which thread drives: threads of the program that wait for the outcome, or else a thread of the engine's own,
// which stands by.
//
// The own thread's next act is a pure function, next(), of its last act and the answer to that act. Each act is one
// access to what threads share, or one sleep. tests/core/engine/progress/progress_driver_test.cpp walks all orders of
// the accesses of the own thread and of threads of the program.
//
// Thread-safety: any thread; await_turn() by the own thread alone. Failure: none.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "base/deadline.h"

namespace syncengine {

// The loop that moves bytes between hosts, as the engine sees it. A thread of the program that waits moves the bytes
// itself: it has nothing else to do, and needs no wake-up when bytes arrive. While no thread waits, the loop's own
// thread moves them.
//
// Ownership: the communicators that reach over hosts. Thread-safety: any thread; poll() and release() by the thread
// that has claimed. Failure: a peer that fails fails its transfers.

class IoLoop {
 public:
  virtual ~IoLoop() = default;
  // Makes the calling thread the one that moves bytes, which must then do so at least every few milliseconds until it
  // releases. Returns false if the thread can't, or another thread does.
  virtual bool claim() = 0;
  // Moves all bytes that can be moved. If there are none, sleeps until a pass of the engine can do more, until wake(),
  // or for `at_most`. Returns true if a pass can do more.
  virtual bool poll(Duration at_most) = 0;
  virtual void release() = 0;
  virtual void wake() = 0;    // poll() returns soon
  virtual void notify() = 0;  // there are bytes to move: wakes the loop's own thread, unless another one moves them
};

class Driver {
 public:
  enum class ThreadAct : uint8_t {
    Ticket,      // note the number of calls so far
    Park,        // from now on calls wake this thread
    AskStopped,  // has stop() been called?
    AskWork,     // is there any?
    AskDriven,   // does a thread of the program drive?
    AskCalled,   // has there been a call since the ticket before: for work that can't wait?
    AskVisited,  // have threads of the program come by since the last such question? The next may be near
    Sleep,       // until a call
    Hush,        // calls don't wake this thread any more
    Doze,        // a few milliseconds; or until a call, unless hushed
    Unpark,      // as Hush; a thread that comes from now on sees that it has to interrupt this one
    AskAgain,    // does a thread of the program drive, that came before Unpark?
    Drive,
    End,
  };

  enum class Kind : uint8_t {
    Handed,  // a thread that leaves while there is work calls. Where threads of the program come by, the work can wait
    Found,   // there may always be work, and a thread that leaves does not call
  };

  static constexpr ThreadAct next(Kind kind, ThreadAct act, bool answer = false) {
    const bool handed = kind == Kind::Handed;
    switch (act) {
      case ThreadAct::Ticket: return ThreadAct::Park;
      case ThreadAct::Park: return ThreadAct::AskStopped;
      case ThreadAct::AskStopped: return answer ? ThreadAct::End : ThreadAct::AskWork;
      case ThreadAct::AskWork: return answer ? ThreadAct::AskDriven : ThreadAct::Sleep;
      case ThreadAct::AskDriven: return !answer ? ThreadAct::AskCalled : handed ? ThreadAct::Sleep : ThreadAct::Doze;
      case ThreadAct::AskCalled: return answer && !handed ? ThreadAct::Unpark : ThreadAct::AskVisited;
      case ThreadAct::AskVisited: return !answer ? ThreadAct::Unpark : handed ? ThreadAct::Hush : ThreadAct::Doze;
      case ThreadAct::Hush: return ThreadAct::Doze;
      case ThreadAct::Unpark: return ThreadAct::AskAgain;
      case ThreadAct::AskAgain: return answer ? ThreadAct::Ticket : ThreadAct::Drive;
      case ThreadAct::Sleep:
      case ThreadAct::Doze:
      case ThreadAct::Drive:
      case ThreadAct::End: return ThreadAct::Ticket;
    }
    return ThreadAct::End;
  }

  // `has_work` says whether there is work to drive; the own thread calls it while other threads run.
  Driver(Kind kind, std::function<bool()> has_work) : kind_(kind), has_work_(std::move(has_work)) {}

  // Methods for threads of the program, which call them in the orders that progress_driver_test.cpp walks.
  void enter() { drivers_.fetch_add(1, std::memory_order_seq_cst); }  // the thread drives from now on
  bool claim();                                                       // enter(), but only if no other thread drives
  void leave() { drivers_.fetch_sub(1, std::memory_order_seq_cst); }
  void visit() { visits_.fetch_add(1, std::memory_order_relaxed); }  // relaxed: a hint
  void call();                                                       // tells the own thread that there is work
  bool is_driven() const { return drivers_.load(std::memory_order_seq_cst) > 0; }
  bool is_parked() const { return parked_.load(std::memory_order_seq_cst); }
  void ignore_visits() { counts_visits_ = false; }  // before there is work
  void stop();
  bool is_stopped() const { return stopped_.load(std::memory_order_seq_cst); }

  // Called by the own thread: returns true when it is to drive for a turn, false after stop().
  bool await_turn();

 private:
  const Kind kind_;
  const std::function<bool()> has_work_;
  bool counts_visits_ = true;
  std::atomic<int> drivers_{0};  // threads of the program that drive
  std::atomic<uint64_t> visits_{0};
  std::atomic<uint32_t> calls_{0};  // futex word of the own thread
  std::atomic<bool> parked_{false};
  std::atomic<bool> stopped_{false};
  uint32_t ticket_ = 0;       // of the own thread alone
  uint64_t visits_seen_ = 0;  // of the own thread alone
};

}  // namespace syncengine
