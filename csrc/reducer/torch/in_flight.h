// Asynchronous collectives of this process that have not ended, by the memory of their tensors.
//
// The engine runs the collectives of a communicator in the order of their calls. But a tensor that is not contiguous
// goes through a copy: it is read at the call, and written when the collective has ended. So a call waits for the
// earlier ones on the same memory if either of the two goes through a copy.
//
// Ownership: one for the process; never destroyed, since it may hold tensors of Python's. Thread-safety: any thread;
// no lock while there are none. Failure: await() throws what an earlier call fails with.
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
    bool copies = false;
    std::weak_ptr<Communicator> communicator;
    std::vector<std::weak_ptr<Work>> works = {};  // the engine keeps those that have not ended
    std::function<void()> deliver = {};  // puts results into their tensors once these have ended. Without the GIL

    bool has_ended() const;
    void finish() const;
  };

  static InFlight& of_process();

  // Finishes those that have ended: the program may have dropped them.
  void add(Call call);

  // Before a call that reads or writes `tensor`, perhaps through a copy: waits for those that it must not overtake.
  void await(const at::Tensor& tensor, bool copies) {
    if (any_.load(std::memory_order_relaxed)) await_those_on(extent_of(tensor), copies);
  }

 private:
  void await_those_on(const Extent& extent, bool copies);
  void finish_ended();

  std::atomic<bool> any_{false};
  std::mutex mutex_;
  std::vector<Call> calls_;
};

}  // namespace syncengine
