// The thread that completes futures. Their callbacks may run Python, wait for the GIL, or make calls, none of which the
// engine's own thread may do; and it drives the engine while it waits, as every thread does.
//
// Ownership: shared by the backend, its works and the thread, which begins with the first future, and ends after stop().
// Thread-safety: any thread. Failure: a work's error goes to its future.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

namespace syncengine {

class TorchWork;

class Completer : public std::enable_shared_from_this<Completer> {
 public:
  enum class Order {
    AsAdded,  // collectives end in the order of their calls: waits for the first
    AsEnded,  // messages don't: looks at all of them, every millisecond while there are any
  };
  explicit Completer(Order order) : order_(order) {}

  // Completes its future once it has ended.
  void add(c10::intrusive_ptr<TorchWork> work);

  // After all works have ended, well or not; without the GIL. To be called once at least, or the thread stays.
  void stop();

 private:
  void run();
  void wait_for_one(std::unique_lock<std::mutex>& lock);

  Order order_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<TorchWork>> works_;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace syncengine
