// Functions that say which of torch's tensors the engine can take, and which elements they have, in what order.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/ScalarType.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "collectives/operation.h"

namespace syncengine {

// The kind of tensor that `tensor` is instead of a dense one ("a nested one"); empty if it is dense, on any device.
inline std::string why_not_dense(const at::Tensor& tensor) {
  if (!tensor.defined()) return "an undefined tensor";
  if (tensor.layout() != at::kStrided) return "one of layout " + c10::str(tensor.layout());
  if (tensor.is_nested()) return "a nested one";
  if (tensor.is_quantized()) return "a quantized one";
  return "";
}

// The kind of tensor that `tensor` is if it has no memory to read (of a DTensor only the parts have it); else empty.
inline std::string why_without_memory(const at::Tensor& tensor) {
  if (tensor.numel() == 0 || (tensor.has_storage() && tensor.storage().data() != nullptr)) return "";
  return "one without memory of its own (as a DTensor, whose to_local() has it)";
}

// The elements of a tensor as real numbers: the values of a sparse one, both parts of complex ones.
inline at::Tensor elements_of(const at::Tensor& tensor) {
  const at::Tensor values = tensor.is_sparse() ? tensor._values() : tensor;
  return values.is_complex() ? at::view_as_real(values.resolve_conj()) : values;
}

// Multiplies `numbers` by a factor as the engine's kernels do, rounding once. The factor is a tensor, as torch would
// round a scalar to 16 bits for some dtypes; `numbers` get a dimension, as torch would compute in double without any.
inline void scale(const at::Tensor& numbers, double factor) {
  (numbers.dim() == 0 ? numbers.view({1}) : numbers).mul_(at::scalar_tensor(factor, at::kDouble));
}

// Whether torch can't add sparse tensors of this dtype.
inline bool is_narrow(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

// Whether all elements are finite: they are if their sum is. Else a second pass looks, as the sum may have overflowed.
inline bool all_finite(const at::Tensor& tensor) {
  const at::Tensor elements = elements_of(tensor);
  const bool narrow = elements.is_floating_point() && elements.element_size() == 2;
  if (std::isfinite(elements.sum(narrow ? std::optional(at::kFloat) : std::nullopt).item<double>())) return true;
  return elements.isfinite().all().item<bool>();
}

// Puts a value into a tensor of the program, in any grad or inference mode, whichever the tensors were made in: torch
// itself writes inference tensors only in inference mode. Autograd records nothing, but sees a new version of the
// target, if that has versions. Thread-safety: any thread. Aliasing: as at::Tensor::copy_(), whose errors it throws.
inline void assign(const at::Tensor& target, const at::Tensor& value) {
  const at::AutoDispatchBelowADInplaceOrView no_autograd;
  target.copy_(value);
  if (!target.is_inference()) target.unsafeGetTensorImpl()->bump_version();
}

// Mixes sizes and strides into a hash, but not those of dimensions of one element, whose strides have no meaning.
inline uint64_t mix_strides(uint64_t hash, const at::Tensor& tensor) {
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) != 1) hash = mix(mix(hash, tensor.size(d)), tensor.stride(d));
  }
  return hash;
}

// The order of a parameter's elements in memory when it was wrapped, which is the same on all ranks. Later any rank may
// change its own, so ranks compare the order before they add bytes to bytes.
class ElementOrder {
 public:
  explicit ElementOrder(const at::Tensor& parameter) {
    if (parameter.layout() != c10::kStrided || parameter.is_contiguous()) return;
    if (!parameter.is_non_overlapping_and_dense()) return;
    sizes_ = parameter.sizes().vec();
    strides_ = parameter.strides().vec();
    hash_ = mix_strides(0, parameter);
  }

  // A hash of this order; 0 if contiguous. Ranks compare it, as it may differ where each has copied a model by itself.
  uint64_t hash() const { return hash_; }

  // The elements of `flat`, as many as `like` has, in this order; in the usual order if `like` has got other sizes.
  at::Tensor view(const at::Tensor& flat, const at::Tensor& like) const {
    const bool is_usual = strides_.empty() || like.sizes() != at::IntArrayRef(sizes_);
    return is_usual ? flat.view(like.sizes()) : flat.as_strided(sizes_, strides_);
  }

 private:
  std::vector<int64_t> sizes_, strides_;  // empty: contiguous
  uint64_t hash_ = 0;
};

// The engine's dtype for torch's. A complex number counts as two real ones. Nothing for dtypes that no gradient has.
inline std::optional<DType> gradient_dtype(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Half:
    case c10::ScalarType::ComplexHalf: return DType::Float16;
    case c10::ScalarType::BFloat16: return DType::BFloat16;
    case c10::ScalarType::Float:
    case c10::ScalarType::ComplexFloat: return DType::Float32;
    case c10::ScalarType::Double:
    case c10::ScalarType::ComplexDouble: return DType::Float64;
    default: return std::nullopt;
  }
}

}  // namespace syncengine
