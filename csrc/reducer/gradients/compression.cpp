#include "reducer/gradients/compression.h"

#include <ATen/core/grad_mode.h>

#include "base/error.h"
#include "reducer/torch/tensor_dtype.h"

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

}  // namespace syncengine
