// Values that are put into tensors of the program, past autograd.
//
// Thread-safety: any thread. Aliasing: as at::Tensor::copy_(), whose errors it throws.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

namespace syncengine {

// Neither the caller's mode nor the one in which the tensors were made matters: torch itself writes inference tensors
// in inference mode alone. Autograd records nothing, but sees a new version of the target, if that has versions.
inline void assign(const at::Tensor& target, const at::Tensor& value) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  target.copy_(value);
  if (!target.is_inference()) target.unsafeGetTensorImpl()->bump_version();
}

}  // namespace syncengine
