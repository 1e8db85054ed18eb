// Finds out who has brought a gradient that is NaN or infinite, in one backward: Parallel(nonfinite=...).
//
// The rank that reduces an element reads every rank's value, and notes which are not finite (collectives/operation.h).
// After the last bucket the ranks exchange, for each rank, the earliest such element, so that all report the same. No
// rank puts averages into .grad before that has ended. If the engine reduces dense gradients on the CPUs of one host, a
// bucket's results show each rank whether any has noted something, and if none has, there is no exchange.
//
// Ownership: its backward's; operations hold the words. The gradients outlive it. Thread-safety: the reducer's lock, or
// the one thread that is at the backward's end. Failure: what the communicator throws.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "collectives/operation.h"
#include "reducer/buckets/averaging.h"
#include "reducer/gradients/gradient.h"
#include "steps/bucket_plan.h"

namespace syncengine {

class NonfiniteWatch {
 public:
  // `words` are for the notes: one for each rank, and one for sums of finite gradients that overflow. `seen`:
  // operations themselves show all ranks whether anything was noted.
  NonfiniteWatch(std::shared_ptr<const BucketPlan> plan, const std::vector<Gradient>& gradients, Nonfinite words,
                 int world, bool seen);

  // The notes for the operation that reduces this bucket.
  std::shared_ptr<const Nonfinite> of(const BucketLayout& layout) const;
  // Notes it if values of a parameter are not all finite. `rank` brought them, or nobody if it is the number of ranks.
  // Returns whether all are finite.
  bool look(size_t parameter, const at::Tensor& values, int rank) const;
  // Looks at the `results` that a communication hook has made of this rank's own gradients of a bucket.
  void look_behind_hook(const BucketLayout& layout, const std::vector<at::Tensor>& results,
                        const std::vector<at::Tensor>& own, int rank) const;

  // Whether agree() must be called, once all buckets are reduced: the same on all ranks.
  bool has_news() const { return !words_.anywhere || *words_.anywhere; }
  // Tells the others this rank's notes of this step of the model, and waits for theirs. Returns a text about all of
  // them with the number of this `backward`, the same on all ranks; empty if all is finite.
  std::string agree(const Averaging& averaging, const ModelNames& names, uint64_t step, uint64_t backward) const;

 private:
  // An element is identified by its bucket and its place there.
  static constexpr int kPlaceBits = 40;
  size_t count_elements(const BucketLayout& layout, size_t parameter) const;
  size_t parameter_at(uint64_t element) const;

  const std::shared_ptr<const BucketPlan> plan_;
  const std::vector<Gradient>& gradients_;
  const int world_;
  Nonfinite words_;
};

}  // namespace syncengine
