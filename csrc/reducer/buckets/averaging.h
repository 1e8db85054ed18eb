// The part that all buckets of a model have in common: with whom they are averaged, how contributions are scaled, and
// in which dtype they travel.
//
// Ownership: the reducer's, as long as the model lives. Thread-safety: the reducer's lock.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "collectives/operation.h"
#include "engine/communicator/communicator.h"
#include "reducer/gradients/gradient.h"
#include "reducer/gradients/tree_sums.h"
#include "reducer/torch/tensors.h"
#include "steps/bucket_plan.h"
#include "steps/texts.h"

namespace syncengine {

// Settings of a reducer, which never change.
struct ReducerOptions {
  bool find_unused_parameters = false;         // look for them at each forward
  bool static_graph = false;                   // look for them once, and count how often each hook fires
  bool skip_all_reduce_unused_params = false;  // buckets of nothing but unused parameters are not reduced
  bool gradient_as_bucket_view = false;        // these two: only for how DDP rounds, see Scaling
  bool batched_grad_copy = false;
  bool waits_in_between = false;  // ranks wait for each other in forward or backward, too (SyncBatchNorm)
  std::string nonfinite = {};     // "raise" or "warn": ranks say who brings NaN or Inf
  bool flat_buckets = false;      // on CPUs, too, as on devices: for tests
};

// The ways in which contributions are scaled to an average. They differ only in rounding, and only if the divisor is
// not a power of two: kept for the bits of DDP, which has all three.
enum class Scaling : uint8_t {
  Multiply,  // by 1/N: DDP's default, while it copies into the bucket
  Divide,    // by N
  // Like Divide if .grad lies in the bucket already (gradient_as_bucket_view); like Multiply if it is copied there.
  DivideViewed,
};

inline Scaling scaling_of(const ReducerOptions& options, Numerics numerics) {
  if (numerics != Numerics::Ring) return Scaling::Multiply;
  if (options.batched_grad_copy) return Scaling::Divide;
  return options.gradient_as_bucket_view ? Scaling::DivideViewed : Scaling::Multiply;
}

struct Averaging {
  const std::shared_ptr<Communicator> communicator;
  size_t parameters;  // of the model
  Scaling scaling;
  // Whether contributions are scaled, as DDP does in copying to the bucket; else the sum is scaled, which rounds once.
  bool scales_first;
  // Float16 or BFloat16: gradients are cast to this dtype, reduced in it, and cast back.
  std::optional<at::ScalarType> travels_as = {};
  std::shared_ptr<const Slots> slots = {};  // one for each possible bucket, then the three below; null until reserved

  int rank() const { return communicator->global_ranks()[communicator->rank()]; }  // of this process, in the whole job
  // Aborts the communicator: peers wait for gradients that this rank will not bring, and the step can't be refused.
  void tell_peers(const std::string& text, ErrorKind kind = ErrorKind::Aborted) const {
    communicator->abort(kind, said_by(rank(), text));
  }

  size_t usage_slot() const { return parameters; }
  size_t vote_slot() const { return parameters + 1; }
  size_t nonfinite_slot() const { return parameters + 2; }
  // Makes a bucket's all-reduce, without memory yet. With a `tree`, contributions are added in the order of that tree.
  Operation operation_of(const std::shared_ptr<const BucketLayout>& layout, const std::optional<TreeStep>& tree) const {
    Operation operation{.dtype = travels_as ? *gradient_dtype(*travels_as) : layout->dtype, .op = ReduceOp::Avg};
    operation.numerics = tree ? Numerics::Tree : communicator->numerics();
    operation.layout_hash = layout->hash;
    operation.describe = [layout] { return layout->describe(); };
    if (!tree) return operation;
    operation.leaves = tree->total;
    operation.layout_hash = mix(mix(layout->hash, tree->total), tree->number);
    operation.describe = [layout, total = tree->total, number = tree->number] {
      return layout->describe() + ", in step " + std::to_string(number) +
             " of micro_batches(total=" + std::to_string(total) + ")";
    };
    return operation;
  }
  // Announces an all-reduce by `op` of words that are no gradients, in this step of the model.
  template <class Word>
  std::shared_ptr<Work> announce(size_t slot, uint64_t step, std::shared_ptr<std::vector<Word>> words, DType dtype,
                                 ReduceOp op, std::function<std::string()> describe) const {
    Operation operation{.dtype = dtype, .op = op, .numerics = communicator->numerics()};
    operation.output.add(reinterpret_cast<std::byte*>(words->data()), words->size() * sizeof(Word));
    operation.input = operation.output;
    operation.describe = std::move(describe);
    operation.keepalive = std::move(words);
    return communicator->announce(slots, slot, step, std::move(operation));
  }
  // Whether one factor for all gradients gives the bits of `scaling`: for Multiply, or if the divisor is a power of 2.
  bool scales_all_alike(double divisor) const {
    int exponent = 0;
    return scaling == Scaling::Multiply || std::frexp(divisor, &exponent) == 0.5;
  }
  // Scales each gradient by itself, where the ways of scaling differ in their bits.
  void scale_one_by_one(const BucketLayout& layout, const std::vector<Gradient>& gradients,
                        const std::vector<at::Tensor>& contributions, double divisor) const {
    at::NoGradGuard no_grad;
    for (size_t k = 0; k < contributions.size(); ++k) {
      // DDP divides a bucket of complex numbers as one of real numbers, twice as many. A gradient that lay in the
      // bucket already (is_kept()) is divided as complex numbers, for which torch multiplies by 1/N.
      if (scaling == Scaling::Divide) {
        elements_of(contributions[k]).div_(divisor);
      } else if (gradients[layout.parameters[k]].is_kept()) {
        contributions[k].div_(divisor);
      } else {
        scale(contributions[k], 1.0 / divisor);
      }
    }
  }
};

}  // namespace syncengine
