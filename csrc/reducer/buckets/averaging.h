// What all buckets of a model have in common: whom they are averaged with, how contributions are scaled, in which dtype
// they travel.
//
// Ownership: the reducer's, as long as the model lives. Thread-safety: the reducer's lock.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/operation.h"
#include "engine/communicator/communicator.h"
#include "reducer/buckets/bucket.h"
#include "reducer/buckets/scaling.h"
#include "reducer/gradients/compression.h"
#include "reducer/gradients/gradient.h"

namespace syncengine {

struct Averaging {
  const std::shared_ptr<Communicator> communicator;
  size_t parameters;  // of the model
  Scaling scaling;
  std::shared_ptr<const Slots> slots = {};  // one for each bucket there may be, then these; from the first plan on
  std::optional<Compression> compression = {};

  size_t usage_slot() const { return parameters; }
  // In turn: what is said about a backward that nobody asks for never meets what is said about the next one.
  size_t reason_slot(uint64_t backward) const { return parameters + 1 + backward % 2; }
  // Collective; blocks. See Reducer::reserve_slots().
  std::shared_ptr<const Slots> reserve_slots(const std::string& model, std::optional<uint64_t> copy_of) const;

  void scale_as(const ReducerOptions& options) { scaling = scaling_of(options, communicator->numerics()); }
  // Without memory.
  Operation operation_of(const BucketLayout& layout) const;
  // DDP scales each contribution as it copies it into the bucket; rank_order scales the sum, and so rounds once.
  bool scales_first() const;
  bool scales_all_alike(double divisor) const { return scaling == Scaling::Multiply || is_exact(divisor); }
  // Where the ways of scaling differ in their bits.
  void scale_one_by_one(const BucketLayout& layout, const std::vector<Gradient>& gradients,
                        const std::vector<at::Tensor>& contributions, double divisor) const;
};

}  // namespace syncengine
