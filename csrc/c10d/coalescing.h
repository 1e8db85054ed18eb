// The calls that each thread has coalesced so far: between its startCoalescing() and its endCoalescing().
//
// Ownership: the backend's. Thread-safety: any thread; no lock while nobody coalesces. Failure: none.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "c10d/call.h"

namespace syncengine {

class Coalescing {
 public:
  // This thread's, or nothing. A call takes them and, unless it throws, gives them back: torch does not end what a call
  // has left by throwing.
  std::unique_ptr<Coalesced> take() {
    if (!any_.load(std::memory_order_relaxed)) return nullptr;  // what this thread has stored it sees
    std::lock_guard lock(mutex_);
    auto found = open_.extract(this_thread());
    any_.store(!open_.empty(), std::memory_order_relaxed);
    return found ? std::move(found.mapped()) : nullptr;
  }

  // Those that this thread had are dropped.
  void give(std::unique_ptr<Coalesced> calls) {
    std::lock_guard lock(mutex_);
    std::swap(open_[this_thread()], calls);
    any_.store(true, std::memory_order_relaxed);
  }

 private:
  // Not the system's number: a new thread may get that of one that has ended, and must not get its calls.
  static uint64_t this_thread() {
    static std::atomic<uint64_t> threads{0};
    static thread_local const uint64_t number = threads.fetch_add(1, std::memory_order_relaxed);
    return number;
  }

  std::atomic<bool> any_{false};
  std::mutex mutex_;
  std::map<uint64_t, std::unique_ptr<Coalesced>> open_;
};

}  // namespace syncengine
