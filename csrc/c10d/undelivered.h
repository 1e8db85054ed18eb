// Works whose results go through copies, until these have been put into their tensors. The program may drop such a work
// and make sure of its end by another call, as by a barrier.
//
// Ownership: shared by the backend and its works, which it keeps. Thread-safety: any thread; no lock while there are
// none. Failure: none, a work keeps the error of its delivery.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <atomic>
#include <mutex>
#include <vector>

namespace syncengine {

class TorchWork;

class Undelivered {
 public:
  using WorkPtr = c10::intrusive_ptr<TorchWork>;

  void add(WorkPtr work);
  void remove(const TorchWork& work);

  // Of those that have ended well, in the order of the calls. When it returns they are delivered, by whichever thread.
  void deliver_ended() {
    if (any_.load(std::memory_order_relaxed)) deliver_all_ended();
  }

  // The same, after the last call; drops all others.
  void close() noexcept;

 private:
  void deliver_all_ended();

  std::atomic<bool> any_{false};
  std::mutex mutex_;
  std::vector<WorkPtr> works_;
};

}  // namespace syncengine
