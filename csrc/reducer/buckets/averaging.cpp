
#include "reducer/buckets/averaging.h"

#include <ATen/core/grad_mode.h>

#include "base/error.h"
#include "reducer/torch/python_error.h"
#include "reducer/torch/tensors.h"

namespace syncengine {

Compression::Compression(c10::ScalarType type, Divides divides) : type_(type), divides_(divides) {
  auto dtype = gradient_dtype(type);
  if (!dtype || c10::isComplexType(type) || c10::elementSize(type) != 2) {
    throw Error(ErrorKind::InvalidUsage,
                "gradients can be compressed to float16 or bfloat16, not to " + std::string(c10::toString(type)));
  }
  dtype_ = *dtype;
}

void Compression::check(const at::Tensor& parameter, const std::string& name) const {
  if (!parameter.is_complex()) return;
  throw Error(ErrorKind::InvalidUsage, "the gradient of " + name + " is complex: it can't be compressed to " +
                                           c10::toString(type_) + "; use no compressing hook with this model");
}

at::Tensor Compression::compress(const at::Tensor& memory, Statistics& statistics) const {
  at::NoGradGuard no_grad;
  at::Tensor compressed = memory.to(type_, /*non_blocking=*/false, /*copy=*/true);
  statistics.count_copy(CopyReason::Compression, compressed.nbytes());
  return compressed;
}

std::shared_ptr<const Slots> Averaging::reserve_slots(const std::string& model, std::optional<uint64_t> copy_of) const {
  auto describe = [model, copy_of] {
    const std::string text = "reserving the buckets of " + model;
    return copy_of ? text + ", a copy of the one with number " + std::to_string(*copy_of) : text;
  };
  return communicator->reserve_slots(parameters + 3, describe, raise_pending_signal);
}

Operation Averaging::operation_of(const BucketLayout& layout) const {
  Operation operation;
  operation.dtype = compression ? compression->dtype() : layout.dtype;
  operation.op = ReduceOp::Avg;
  operation.numerics = communicator->numerics();
  operation.layout_hash = layout.hash;
  operation.describe = [shared = layout.shared_from_this()] { return shared->describe(); };
  return operation;
}

bool Averaging::scales_first() const {
  return communicator->numerics() == Numerics::Ring ||
         (compression && compression->divides() == Compression::Divides::First);
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
