// The interface to the device where a reducer's gradients lie: memory that the peers reach, and a stream on which
// buckets are filled, reduced and emptied, one after the other, while other streams compute.
//
// Ownership: the reducer's. Thread-safety: one thread at a time, any thread, without the GIL. All ranks call allocate()
// and all_reduce() in the same order. Failure: the communicator's error; one that occurs on a stream later is thrown by
// a later call.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "collectives/operation.h"
#include "engine/communicator/communicator.h"
#include "reducer/torch/python_error.h"

namespace syncengine {

class BucketLane {
 public:
  virtual ~BucketLane() = default;

  // Allocates bytes that live as long as their tensor. Collective, with the same `bytes` on all ranks. Blocks.
  virtual at::Tensor allocate(size_t bytes) = 0;

  virtual c10::Stream current() const = 0;  // of the calling thread
  virtual c10::Stream own() const = 0;      // after allocate()

  // Makes `follower` wait: all that it gets from now on comes after all that `leader` has got so far.
  virtual void order(c10::Stream leader, c10::Stream follower) = 0;

  // Whoever frees this memory, nobody gets it before `stream` has done all that is queued there then.
  virtual void keep_for(c10::Stream stream, const at::Tensor& tensor) = 0;

  // Reduces memory of allocate() in place: after all that is queued on its own stream, and before what is queued there
  // after finish().
  virtual void all_reduce(Operation operation) = 0;
  virtual void finish() = 0;

  // Whether the lane's own stream, or the calling thread's current one, is being captured into a CUDA graph.
  virtual bool is_captured() const { return false; }
  // Memory in which this lane's operations note who has brought NaN or infinity; see Nonfinite. Blocks as wait().
  virtual Nonfinite words_for_nonfinite() = 0;
  // Blocks the host until all that is queued on its own stream now is done.
  virtual void wait() = 0;
};

// Makes the words for Nonfinite in host memory: one for each of `world` ranks, and one for sums that overflow.
inline Nonfinite host_words_for_nonfinite(int world) {
  return {.words = std::shared_ptr<uint64_t[]>(new uint64_t[world + 1])};
}

// Makes the reducer's lane on a CUDA device. Throws InvalidUsage, which says what is missing, if there is no such
// device. The ranks connect at its first allocate().
std::unique_ptr<BucketLane> make_device_lane(const std::shared_ptr<Communicator>& communicator, c10::Device device);

// A BucketLane of host memory: for tests of all that is the same on every device.
class HostMemoryLane final : public BucketLane {
 public:
  explicit HostMemoryLane(std::shared_ptr<Communicator> communicator) : communicator_(std::move(communicator)) {}

  at::Tensor allocate(size_t bytes) override {
    const auto memory = communicator_->allocate(bytes);
    return at::from_blob(memory.get(), {static_cast<int64_t>(bytes)}, [memory](void*) {}, at::kByte);
  }
  c10::Stream current() const override { return c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::kCPU, -1)); }
  c10::Stream own() const override { return current(); }
  void order(c10::Stream /*leader*/, c10::Stream /*follower*/) override {}
  void keep_for(c10::Stream /*stream*/, const at::Tensor& /*tensor*/) override {}
  void all_reduce(Operation operation) override { works_.push_back(communicator_->submit(std::move(operation))); }
  void finish() override {
    for (const auto& work : std::exchange(works_, {})) communicator_->wait(work, raise_pending_signal);
  }
  Nonfinite words_for_nonfinite() override { return host_words_for_nonfinite(communicator_->size()); }
  void wait() override {}

 private:
  std::shared_ptr<Communicator> communicator_;
  std::vector<std::shared_ptr<Work>> works_;
};

}  // namespace syncengine
