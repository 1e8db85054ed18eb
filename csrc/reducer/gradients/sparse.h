// Sparse gradients: every rank's indices and values are gathered, and summed here in the order of ranks. Those of a
// device are copied to the host and back, and the host waits for that, on the current stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "engine/communicator/communicator.h"

namespace syncengine {

// Looks at what a rank has brought of one of the gradients, or, where the rank is the size, at the sum of finite
// values. Returns whether it is finite.
using LookAtSparse = std::function<bool(size_t gradient, int rank, const at::Tensor& values)>;

// The sum of two that are coalesced; so is what it returns. Rounded to their dtype.
at::Tensor add_sparse(const at::Tensor& left, const at::Tensor& right);

// Replaces each gradient by the sum over ranks divided by `divisor`, coalesced. In the order of ranks, or as a tree, if
// `merges` has its own (collectives/order.h). Two all-gathers for all of them
// together: the sizes, then indices and values. Every rank must call it at the same place. Returns the bytes that this
// rank contributed. `model` is for messages; `look`, if given, gets what makes a sum that is not finite.
size_t average_sparse(const std::vector<at::Tensor>& gradients, Communicator& communicator, double divisor,
                      const std::string& model, const std::vector<uint8_t>& merges, const LookAtSparse& look);

}  // namespace syncengine
