// Which gradients are reduced together: a pure function of indices and parameters.
//
// Ownership: shared by the model and by the backward that runs by it. Immutable, so any thread may read it.
// Failure: the constructor throws Error(InvalidUsage) if an index is out of range or occurs twice, or if a bucket is
// empty or of several dtypes.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "reducer/buckets/bucket.h"
#include "reducer/gradients/gradient.h"
#include "reducer/gradients/gradient_memory.h"

namespace syncengine {

class BucketPlan {
 public:
  // One bucket for each list of parameter indices. `provisional`: to be replaced as soon as the order is known in which
  // gradients are ready.
  BucketPlan(const std::vector<std::vector<size_t>>& indices, const std::vector<Gradient>& gradients,
             const std::shared_ptr<const ModelNames>& names, bool provisional);

  const std::vector<std::shared_ptr<const BucketLayout>>& buckets() const { return buckets_; }
  bool provisional() const { return provisional_; }

  bool covers(size_t parameter) const { return places_[parameter].bucket != kNone; }
  size_t parameters() const { return parameters_; }  // how many it covers
  // Of a parameter that it covers.
  size_t bucket_of(size_t parameter) const { return places_[parameter].bucket; }
  size_t position_of(size_t parameter) const { return places_[parameter].position; }

  // Whether a parameter that it covers is as large as then, and of the same dtype.
  bool fits(size_t parameter, const at::Tensor& tensor) const {
    return places_[parameter].bytes == tensor.nbytes() && places_[parameter].type == tensor.scalar_type();
  }

  // Whether it covers, as they are now, all parameters that `other` covers and that still require a gradient.
  bool contains(const BucketPlan& other, const std::vector<Gradient>& gradients) const;

  // Parameters in buckets of sparse layout, in order.
  const std::vector<size_t>& sparse() const { return sparse_; }
  // Bytes of the gradients that belong into the pool.
  const gradient_memory::Sizes& pooled_sizes() const { return pooled_sizes_; }

 private:
  static constexpr uint32_t kNone = ~uint32_t{0};
  struct Place {
    uint32_t bucket = kNone, position = 0;
    size_t bytes = 0;
    at::ScalarType type = at::ScalarType::Undefined;
  };

  std::vector<std::shared_ptr<const BucketLayout>> buckets_;
  bool provisional_;
  std::vector<Place> places_;  // by parameter
  size_t parameters_ = 0;
  std::vector<size_t> sparse_;
  gradient_memory::Sizes pooled_sizes_;
};

}  // namespace syncengine
