// Asynchronous calls of this process that have not ended, by the memory of their tensors.
//
// The engine runs the collectives of a communicator in the order of their calls. But some tensors, such as those that
// are not contiguous, go through a copy, which is read at the call, and written back when the call has ended; and
// messages move in any order. So a call waits for earlier ones on the same memory if either of the two goes through a
// copy, or consists of messages, unless both only read that memory. The program may drop the work of such a call, and
// make sure of its end by another call, such as a barrier; therefore the end of any call delivers all that have ended.
//
// Ownership: one for the process; never destroyed, since it may hold tensors of Python's. Thread-safety: any thread; no
// lock while there is nothing to wait for, or to deliver. Failure: await() throws what an earlier call fails with.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/communicator/communicator.h"

namespace syncengine {

// The addresses from a tensor's first element to its last.
struct Extent {
  uintptr_t begin = 0, end = 0;
  bool written = false;
};
Extent extent_of(const at::Tensor& tensor);

class InFlight {
 public:
  struct PendingCall {
    std::vector<Extent> memory = {};
    std::weak_ptr<Communicator> communicator;
    std::vector<std::weak_ptr<Work>> works = {};  // the engine keeps works that have not ended
    bool by_messages = false;
    // Puts the results of copies into their tensors, once the works have ended well; further calls do nothing. Null if
    // the call uses no copies. Called without the GIL; does not throw.
    std::function<void()> deliver = {};
    bool dropped = false;  // used by InFlight

    bool has_ended() const;
    void await() const;
  };

  static InFlight& of_process();

  // Adds a call, and delivers calls that have ended: otherwise a program that waits for none would collect them all.
  void add(PendingCall call);

  // Waits for earlier calls on the memory `extent` that a new call must not overtake, unless both only read it: for all
  // if the new call is `unordered` (goes through a copy, or consists of messages), else for those that are unordered.
  void await(const Extent& extent, bool unordered) {
    if (any_.load(std::memory_order_acquire)) await_those_on(extent, unordered);
  }

  // Delivers the calls that have ended, in their order. When this returns they have been delivered, by whichever
  // thread.
  void deliver_ended() {
    if (any_to_deliver_.load(std::memory_order_acquire)) drop_ended();
  }

 private:
  void await_those_on(const Extent& extent, bool unordered);
  void drop_ended();
  void set_flags();

  // Whether there are calls, and whether any is to be delivered. A thread that reads false takes no lock: by release
  // and acquire it sees the elements that were delivered before.
  std::atomic<bool> any_{false}, any_to_deliver_{false};
  std::mutex mutex_;
  std::vector<std::shared_ptr<PendingCall>> calls_;
};

}  // namespace syncengine
