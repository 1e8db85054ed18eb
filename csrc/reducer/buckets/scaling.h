// How contributions are scaled to an average. The ways differ only in rounding, and only if the divisor is not a power
// of two: kept for the bits of DDP, which has all three.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>

#include <cmath>
#include <cstdint>

#include "collectives/operation.h"
#include "reducer/buckets/options.h"

namespace syncengine {

enum class Scaling : uint8_t {
  Multiply,  // by 1/N: DDP's default, while it copies into the bucket
  Divide,    // by N
  // By N where .grad lies in the bucket already (gradient_as_bucket_view); where it is copied, as Multiply.
  DivideViewed,
};

inline Scaling scaling_of(const ReducerOptions& options, Numerics numerics) {
  if (numerics != Numerics::Ring) return Scaling::Multiply;
  if (options.batched_grad_copy) return Scaling::Divide;
  return options.gradient_as_bucket_view ? Scaling::DivideViewed : Scaling::Multiply;
}

// Whether all three are the same: the divisor is a power of two.
inline bool is_exact(double divisor) {
  int exponent = 0;
  return std::frexp(divisor, &exponent) == 0.5;
}

// Scales in place, as torch does. By a tensor, since mul_(Scalar) rounds the factor to 16 bits where the gradient has
// them.
inline void scale(const at::Tensor& contribution, bool divide, double divisor) {
  if (divide) {
    contribution.div_(divisor);
  } else {
    contribution.mul_(at::scalar_tensor(1.0 / divisor, at::kDouble));
  }
}

}  // namespace syncengine
