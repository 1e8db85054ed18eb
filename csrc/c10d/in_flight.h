// Asynchronous calls of this process that have not ended, by the memory of their tensors.
//
// The engine runs the collectives of a communicator in the order of their calls. But a tensor that is not contiguous
// goes through a copy: it is read at the call, and written when the call has ended. So a call waits for the earlier
// ones on the same memory if either of the two goes through a copy. And as the program may drop the work of such a
// call, and make sure of its end by another one, as by a barrier, all that have ended are delivered at each end.
//
// Ownership: one for the process; never destroyed, since it may hold tensors of Python's. Thread-safety: any thread;
// no lock while there is nothing to wait for, or to deliver. Failure: await() throws what an earlier call fails with.
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
};
Extent extent_of(const at::Tensor& tensor);

class InFlight {
 public:
  struct Call {
    std::vector<Extent> memory = {};
    std::weak_ptr<Communicator> communicator;
    std::vector<std::weak_ptr<Work>> works = {};  // the engine keeps those that have not ended
    // If it goes through copies: puts the results into their tensors once these have ended well; called again it does
    // nothing. Without the GIL; does not throw.
    std::function<void()> deliver = {};
    bool dropped = false;  // the list's

    bool has_ended() const;
    void await() const;
  };

  static InFlight& of_process();

  // Delivers those that have ended, too: or a program that waits for none of them collects them all.
  void add(Call call);

  // Before a call that reads or writes `tensor`, perhaps through a copy: waits for those that it must not overtake.
  void await(const at::Tensor& tensor, bool copies) {
    if (any_.load(std::memory_order_acquire)) await_those_on(extent_of(tensor), copies);
  }

  // Of those that have ended, in the order of the calls. When it returns they are delivered, by whichever thread.
  void deliver_ended() {
    if (any_to_deliver_.load(std::memory_order_acquire)) drop_ended();
  }

 private:
  void await_those_on(const Extent& extent, bool copies);
  void drop_ended();
  void set_flags();

  // A thread that reads false takes no lock. Release: elements were delivered before. Acquire: they are read behind.
  std::atomic<bool> any_{false}, any_to_deliver_{false};
  std::mutex mutex_;
  std::vector<std::shared_ptr<Call>> calls_;
};

}  // namespace syncengine
