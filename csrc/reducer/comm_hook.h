// A user's communication hook (register_comm_hook), or one of torch's: it gets each bucket as a c10d::GradBucket, in flat
// memory that is kept from step to step, and gives a future of what the gradients become.
//
// On a device all of it, the hook too, runs on the stream that is current where start() and finish() are called, as under DDP;
// the caller has ordered that stream with those that touch the gradients.
//
// Ownership: holds the hook, the flat memory and the futures. Thread-safety: none. Called without the GIL and without the
// reducer's lock, since a hook is anybody's code. Failure: what the hook or its future raises, as Python's own exception.
#pragma once

#include <torch/csrc/distributed/c10d/comm.hpp>

#include <memory>
#include <string>
#include <vector>

#include "engine/communicator.h"
#include "reducer/bucket.h"
#include "reducer/future.h"
#include "reducer/gradient.h"
#include "reducer/statistics.h"

namespace syncengine {

class CommHook {
 public:
  explicit CommHook(std::unique_ptr<c10d::CommHookInterface> hook) : hook_(std::move(hook)) {}

  // Buckets have changed: forgets their memory.
  void reset(size_t buckets) { flights_ = std::vector<Flight>(buckets); }
  // What start() is going to copy.
  static size_t bytes(const std::vector<at::Tensor>& memory);
  // Hands over a bucket. `parameters` and `memory`: its parameters, and where their gradients lie.
  void start(const BucketLayout& layout, std::vector<at::Tensor> parameters, const std::vector<at::Tensor>& memory);
  // Waits for the future, writes what it gave to `memory`, and returns it: on a device the current stream still reads it.
  at::Tensor finish(const BucketLayout& layout, const std::vector<at::Tensor>& memory, Communicator& communicator);

 private:
  struct Flight {
    at::Tensor flat;
    TorchFuture future;
  };

  std::unique_ptr<c10d::CommHookInterface> hook_;
  std::vector<Flight> flights_;  // by bucket
};

// Of the exception that is being handled, in a few words: "ValueError: ..."
std::string current_error_text();

}  // namespace syncengine
