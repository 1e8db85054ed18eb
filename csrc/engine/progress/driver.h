// Who drives: the threads of the program that wait for the outcome, or else one of the engine's own, which stands by.
//
// The own thread's next act is a pure function of the last one and its answer, next(). All that can happen between it
// and threads of the program is walked by tests/core/engine/progress/progress_driver_test.cpp. Each act is one access
// to what threads share, or one sleep.
//
// Thread-safety: any thread; await_turn() by the own one. Failure: none.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "base/deadline.h"

namespace syncengine {

// What moves bytes between hosts, as the engine sees it: a thread of its own, but while a thread of the program waits,
// that thread. It has nothing else to do, and needs no wake-up to go on with what has come.
//
// Ownership: the communicators that reach over hosts. Thread-safety: any thread; poll() and release() by the one that
// claimed. Failure: what fails a peer fails its transfers.

class IoLoop {
 public:
  virtual ~IoLoop() = default;
  // From now on the calling thread moves the bytes, and must do so at least every few milliseconds until it releases.
  // False: it can't, or another one does.
  virtual bool claim() = 0;
  // Moves what can be moved, and sleeps where nothing can, until passes may go on (then it is true), wake() or
  // `at_most`.
  virtual bool poll(Duration at_most) = 0;
  virtual void release() = 0;
  virtual void wake() = 0;    // poll() returns soon
  virtual void notify() = 0;  // there is something to move: wakes the loop's own thread, unless another one is at it
};

class Driver {
 public:
  enum class Act : uint8_t {
    Ticket,      // notes how often it has been called
    Park,        // from now on calls wake it
    AskStopped,  //
    AskWork,     // is there any?
    AskDriven,   // by a thread of the program
    AskCalled,   // since the ticket before: what can't wait
    AskVisited,  // did threads of the program come by, since it asked last? The next may be near
    Sleep,       // until it is called
    Hush,        // calls don't wake it any more
    Doze,        // a few milliseconds; until it is called, unless hushed
    Unpark,      // as Hush; who comes from now on sees that it has to be interrupted
    AskAgain,    // is it driven? By one that came before
    Drive,
    End,
  };

  enum class Kind : uint8_t {
    Handed,  // who leaves while there is work calls. Calls are no hurry: where threads of the program come by, it waits
    Found,   // there may always be work, and who leaves does not call
  };

  static constexpr Act next(Kind kind, Act act, bool answer = false) {
    const bool handed = kind == Kind::Handed;
    switch (act) {
      case Act::Ticket: return Act::Park;
      case Act::Park: return Act::AskStopped;
      case Act::AskStopped: return answer ? Act::End : Act::AskWork;
      case Act::AskWork: return answer ? Act::AskDriven : Act::Sleep;
      case Act::AskDriven: return !answer ? Act::AskCalled : handed ? Act::Sleep : Act::Doze;
      case Act::AskCalled: return answer && !handed ? Act::Unpark : Act::AskVisited;
      case Act::AskVisited: return !answer ? Act::Unpark : handed ? Act::Hush : Act::Doze;
      case Act::Hush: return Act::Doze;
      case Act::Unpark: return Act::AskAgain;
      case Act::AskAgain: return answer ? Act::Ticket : Act::Drive;
      case Act::Sleep:
      case Act::Doze:
      case Act::Drive:
      case Act::End: return Act::Ticket;
    }
    return Act::End;
  }

  // `has_work`: any thread may ask.
  Driver(Kind kind, std::function<bool()> has_work) : kind_(kind), has_work_(std::move(has_work)) {}

  // Threads of the program. The order in which they act is part of what is walked.
  void enter() { drivers_.fetch_add(1, std::memory_order_seq_cst); }  // it drives from now on
  bool claim();                                                       // the same, if no other one does
  void leave() { drivers_.fetch_sub(1, std::memory_order_seq_cst); }
  void visit() { visits_.fetch_add(1, std::memory_order_relaxed); }  // relaxed: a hint
  void call();                                                       // there is work
  bool is_driven() const { return drivers_.load(std::memory_order_seq_cst) > 0; }
  bool is_parked() const { return parked_.load(std::memory_order_seq_cst); }
  void ignore_visits() { counts_visits_ = false; }  // before there is work
  void stop();
  bool is_stopped() const { return stopped_.load(std::memory_order_seq_cst); }

  // The own thread: returns when it is to drive for a turn, or false: it was stopped.
  bool await_turn();

 private:
  const Kind kind_;
  const std::function<bool()> has_work_;
  bool counts_visits_ = true;
  std::atomic<int> drivers_{0};  // of the program
  std::atomic<uint64_t> visits_{0};
  std::atomic<uint32_t> calls_{0};  // futex word of the own thread
  std::atomic<bool> parked_{false};
  std::atomic<bool> stopped_{false};
  uint32_t ticket_ = 0;  // the own thread's, as the next
  uint64_t visits_seen_ = 0;
};

}  // namespace syncengine
