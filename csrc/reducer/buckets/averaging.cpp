
#include "reducer/buckets/averaging.h"

#include <ATen/core/grad_mode.h>

#include "reducer/torch/tensors.h"

namespace syncengine {

Operation Averaging::operation_of(const BucketLayout& layout) const {
  Operation operation;
  operation.dtype = travels_as ? *gradient_dtype(*travels_as) : layout.dtype;
  operation.op = ReduceOp::Avg;
  operation.numerics = communicator->numerics();
  operation.layout_hash = layout.hash;
  operation.describe = [shared = layout.shared_from_this()] { return shared->describe(); };
  return operation;
}

void Averaging::scale_one_by_one(const BucketLayout& layout, const std::vector<Gradient>& gradients,
                                 const std::vector<at::Tensor>& contributions, double divisor) const {
  at::NoGradGuard no_grad;
  for (size_t k = 0; k < contributions.size(); ++k) {
    bool divide = scaling == Scaling::Divide || gradients[layout.parameters[k]].is_kept();
    scale(contributions[k], divide, divisor);
  }
}

}  // namespace syncengine
