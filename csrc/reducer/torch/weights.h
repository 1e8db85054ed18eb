// Looks at all weights that the ranks of a host have in common at once: with thousands of weights, looking at each from
// Python takes longer than updating it. Used by the thread that steps the optimizer.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace syncengine {

// Notes the versions of parameters, so that this rank sees which of them somebody has written to since.
class WatchedWeights {
 public:
  // Notes places in memory once, so that moved() sees if another thread ever moves one (by sending it to a process).
  explicit WatchedWeights(const std::vector<at::Tensor>& parameters) {
    noted_.reserve(parameters.size());
    for (const auto& parameter : parameters) {
      noted_.push_back({.parameter = parameter,
                        .data = parameter.const_data_ptr(),
                        .sizes = parameter.sizes().vec(),
                        .strides = parameter.strides().vec()});
    }
    note();
  }

  // Notes the parameters' versions: from now on, a parameter with another version counts as written.
  void note() {
    for (Noted& noted : noted_) noted.version = noted.present_version();
  }
  // Called when all ranks have updated the parameters: raises and notes versions, so that older graphs can't be used.
  void note_update() {
    for (Noted& noted : noted_) noted.parameter.unsafeGetTensorImpl()->bump_version();
    note();
  }
  // moved(): the first parameter that does not lie where it did, or has other sizes or strides there. written(): the
  // first whose version is not the noted one.
  std::optional<size_t> moved() const {
    return first([](const Noted& noted) {
      const at::Tensor& now = noted.parameter;
      return now.const_data_ptr() != noted.data || now.sizes() != noted.sizes || now.strides() != noted.strides;
    });
  }
  std::optional<size_t> written() const {
    return first([](const Noted& noted) { return noted.present_version() != noted.version; });
  }
  // A byte for each parameter: '\0' if it has no gradient, '\1' for a dense one, '\2' for any other.
  std::string gradients() const {
    std::string found(noted_.size(), '\0');
    for (size_t i = 0; i < noted_.size(); ++i) {
      const at::Tensor& gradient = noted_[i].parameter.grad();
      if (gradient.defined()) found[i] = gradient.layout() == at::kStrided ? '\1' : '\2';
    }
    return found;
  }

 private:
  struct Noted {
    at::Tensor parameter;
    const void* data = nullptr;
    std::vector<int64_t> sizes, strides;
    uint32_t version = 0;
    uint32_t present_version() const { return parameter.unsafeGetTensorImpl()->version_counter().current_version(); }
  };

  std::optional<size_t> first(auto&& condition) const {
    const auto found = std::find_if(noted_.begin(), noted_.end(), condition);
    return found == noted_.end() ? std::nullopt : std::optional<size_t>(found - noted_.begin());
  }

  std::vector<Noted> noted_;
};

// Parts of parameters, as tensors that an optimizer updates, and which borrow the parameters' gradients for that.
class WeightSlices {
 public:
  struct Slice {
    at::Tensor parameter;
    at::Tensor tensor;  // all of the parameter's elements; or [begin, end) of them as a vector, in order of memory
    int64_t begin = 0;
  };
  explicit WeightSlices(std::vector<Slice> slices) : slices_(std::move(slices)) {}

  // Gives each tensor its part of the parameter's gradient, copied if the gradient is laid out otherwise, or none.
  void take_gradients() {
    for (auto& [parameter, tensor, begin] : slices_) {
      at::Tensor gradient = parameter.grad();
      if (gradient.defined()) {
        gradient = gradient.detach();
        if (tensor.numel() != parameter.numel()) {
          if (gradient.strides() != parameter.strides()) {
            gradient = at::empty_strided(parameter.sizes(), parameter.strides(), gradient.options()).copy_(gradient);
          }
          gradient = gradient.as_strided({tensor.numel()}, {1}, gradient.storage_offset() + begin);
        }
      }
      tensor.mutable_grad() = std::move(gradient);
    }
  }
  void drop_gradients() {
    for (Slice& slice : slices_) slice.tensor.mutable_grad() = at::Tensor();
  }

 private:
  std::vector<Slice> slices_;
};

}  // namespace syncengine
