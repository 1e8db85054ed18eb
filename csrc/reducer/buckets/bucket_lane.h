// What a reducer asks of the device where its gradients lie: memory that the peers reach, and a stream on which buckets
// are filled, reduced and emptied, one after the other, while other streams compute.
//
// Ownership: the reducer's. Thread-safety: one thread at a time, any thread, without the GIL. All ranks call allocate()
// and all_reduce() in the same order. Failure: the communicator's error; one that occurs on a stream later is thrown by
// a later call.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstddef>

#include "collectives/operation.h"

namespace syncengine {

class BucketLane {
 public:
  virtual ~BucketLane() = default;

  // Bytes that live as long as their tensor. Collective, with the same `bytes` on all ranks. Blocks.
  virtual at::Tensor allocate(size_t bytes) = 0;

  virtual c10::Stream current() const = 0;  // of the calling thread
  virtual c10::Stream own() const = 0;      // after allocate()

  // What `follower` gets from now on comes after what `leader` has by now.
  virtual void order(c10::Stream leader, c10::Stream follower) = 0;

  // Whoever frees this memory, nobody gets it before `stream` is done with what it has by then.
  virtual void keep_for(c10::Stream stream, const at::Tensor& tensor) = 0;

  // Reduces memory of allocate() in place: behind what its own stream has, and before what that gets after finish().
  virtual void all_reduce(Operation operation) = 0;
  virtual void finish() = 0;
};

}  // namespace syncengine
