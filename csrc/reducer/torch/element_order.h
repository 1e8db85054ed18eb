// In which order the elements of a gradient lie in memory. Ranks compare it before they add bytes to bytes.
//
// Thread-safety: none.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace syncengine {

// FNV-1a, a word at a time: told apart must be honest mistakes, not attacks.
inline uint64_t mix(uint64_t hash, uint64_t value) { return (hash ^ value) * 1099511628211u; }

// Strides of dimensions of one element say nothing.
inline uint64_t mix_strides(uint64_t hash, const at::Tensor& tensor) {
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) != 1) hash = mix(mix(hash, tensor.size(d)), tensor.stride(d));
  }
  return hash;
}

// That of a parameter when it was wrapped: all ranks have the same. Later any of them may change its own.
class ElementOrder {
 public:
  explicit ElementOrder(const at::Tensor& parameter) {
    if (parameter.layout() != c10::kStrided || parameter.is_contiguous()) return;
    if (!parameter.is_non_overlapping_and_dense()) return;
    sizes_ = parameter.sizes().vec();
    strides_ = parameter.strides().vec();
  }

  // Added to a hash that ranks compare: copies of a model are as each rank made them.
  uint64_t mix_into(uint64_t hash) const {
    for (size_t d = 0; d < strides_.size(); ++d)
      if (sizes_[d] != 1) hash = mix(mix(hash, sizes_[d]), strides_[d]);
    return hash;
  }

  // The elements of `flat`, as many as `like` has, in this order; in the usual one if `like` has got other sizes.
  at::Tensor view(const at::Tensor& flat, const at::Tensor& like) const {
    const bool is_usual = strides_.empty() || like.sizes() != at::IntArrayRef(sizes_);
    return is_usual ? flat.view(like.sizes()) : flat.as_strided(sizes_, strides_);
  }

 private:
  std::vector<int64_t> sizes_, strides_;  // empty: contiguous
};

}  // namespace syncengine
