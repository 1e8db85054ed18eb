// Averages sparse gradients: every rank's indices and values are gathered, and summed here in the order of ranks. A
// device's gradients are copied to the host and back, for which the host waits, on the current stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "engine/communicator/communicator.h"

namespace syncengine {

// Looks at the values of `gradient` from a rank, or, if `rank` is the number of ranks, at the sum of finite values.
// Returns whether they are finite.
using LookAtSparse = std::function<bool(size_t gradient, int rank, const at::Tensor& values)>;

// The sum of two coalesced gradients, which is coalesced, too, and rounded to their dtype.
at::Tensor add_sparse(const at::Tensor& left, const at::Tensor& right);

// Replaces each gradient by the sum over ranks divided by `divisor`, coalesced. Sums are made in the order of ranks, or
// as a tree if `merges` describes one (collectives/order.h).
//
// Makes two all-gathers for all gradients together: the sizes, then indices and values. Every rank must call it at the
// same place. Returns the bytes that this rank contributed. `model` is for texts; `look`, if given, is called with the
// values of sums that are not finite.
size_t average_sparse(const std::vector<at::Tensor>& gradients, Communicator& communicator, double divisor,
                      const std::string& model, const std::vector<uint8_t>& merges, const LookAtSparse& look);

}  // namespace syncengine
