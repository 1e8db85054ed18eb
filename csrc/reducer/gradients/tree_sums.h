// Sums of gradients of this rank's micro-batches, within one step, that wait for their other halves in the tree over
// all micro-batches (collectives/order.h).
//
// Ownership: holds the gradients that it has taken out of .grad. Aliasing: writes only into sums that it has made,
// since others may share the memory of autograd's gradients. Thread-safety: none. Failure: throws torch's errors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace syncengine {

class TreeSums {
 public:
  // `parameters` are all of a model's, in the order of its reducer.
  explicit TreeSums(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {}

  // Moves the gradients of one micro-batch out of .grad, then replaces the last two sums by their sum, `merges` times.
  // Returns whether there was any gradient.
  bool take(size_t merges);
  // Adds all waiting sums, the last first, to the gradient of parameter `index` in the last micro-batch, whose memory
  // nobody else reads. Returns that gradient, or a new one if it is sparse.
  at::Tensor complete(size_t index, at::Tensor gradient) const;
  // Divides the only sum that is left by `divisor`, and puts it into .grad.
  void deliver(double divisor);

 private:
  // `value` is undefined, for zeros, if no micro-batch used the parameter. `made`: this object may write to it.
  struct WaitingSum {
    at::Tensor value;
    bool made = false;
  };
  static void merge(WaitingSum& left, WaitingSum right);

  std::vector<at::Tensor> parameters_;
  std::vector<std::vector<WaitingSum>> sums_;  // each has a sum for every parameter
};

// The sum of two coalesced sparse gradients, which is coalesced, too, and rounded to their dtype.
at::Tensor add_sparse(const at::Tensor& left, const at::Tensor& right);

// The step that a synchronized backward completes, since it brings this rank's last micro-batch.
struct TreeStep {
  std::shared_ptr<const TreeSums> sums;
  uint32_t total;   // micro-batches
  uint64_t number;  // of the step
  bool begun = false;
};

}  // namespace syncengine
