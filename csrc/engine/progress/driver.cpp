#include "engine/progress/driver.h"

#include <chrono>
#include <utility>

#include "base/thread.h"

namespace syncengine {

bool Driver::claim() {
  int none = 0;
  if (!drivers_.compare_exchange_strong(none, 1, std::memory_order_seq_cst)) return false;
  visit();
  return true;
}

void Driver::call() {
  calls_.fetch_add(1, std::memory_order_seq_cst);
  if (is_parked()) futex_wake_all(calls_);
}

void Driver::stop() {
  stopped_.store(true, std::memory_order_seq_cst);
  call();
}

bool Driver::await_turn() {
  // After a thread of the program was there, the own thread leaves everything to such threads for this long. If one of
  // them is kept from its work for longer (by Python's lock, say), the own thread takes over.
  constexpr auto kGrace = std::chrono::milliseconds(10);
  bool called = false;
  for (ThreadAct act = ThreadAct::Ticket;;) {
    bool answer = false;
    switch (act) {
      case ThreadAct::Ticket: {
        uint32_t calls = calls_.load(std::memory_order_seq_cst);
        called = std::exchange(ticket_, calls) != calls;
        break;
      }
      case ThreadAct::Park: parked_.store(true, std::memory_order_seq_cst); break;
      case ThreadAct::AskStopped: answer = is_stopped(); break;
      case ThreadAct::AskWork: answer = has_work_(); break;
      case ThreadAct::AskDriven:
      case ThreadAct::AskAgain: answer = is_driven(); break;
      case ThreadAct::AskCalled: answer = called; break;
      case ThreadAct::AskVisited: {
        uint64_t visits = visits_.load(std::memory_order_relaxed);  // relaxed: a hint
        answer = counts_visits_ && std::exchange(visits_seen_, visits) != visits;
        break;
      }
      case ThreadAct::Sleep: futex_wait(calls_, ticket_, std::chrono::hours(1)); break;
      case ThreadAct::Doze: futex_wait(calls_, ticket_, kGrace); break;
      case ThreadAct::Hush:
      case ThreadAct::Unpark: parked_.store(false, std::memory_order_seq_cst); break;
      case ThreadAct::Drive: return true;
      case ThreadAct::End: return false;
    }
    act = next(kind_, act, answer);
  }
}

}  // namespace syncengine
