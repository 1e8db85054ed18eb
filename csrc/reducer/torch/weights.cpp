#include "reducer/torch/weights.h"

#include <ATen/ops/empty_strided.h>

namespace syncengine {

WatchedWeights::WatchedWeights(const std::vector<at::Tensor>& parameters) {
  noted_.reserve(parameters.size());
  for (const auto& parameter : parameters) {
    noted_.push_back({.parameter = parameter,
                      .data = parameter.const_data_ptr(),
                      .sizes = parameter.sizes().vec(),
                      .strides = parameter.strides().vec()});
  }
  note();
}

void WatchedWeights::note() {
  for (auto& [parameter, data, sizes, strides, version] : noted_) {
    version = parameter.unsafeGetTensorImpl()->version_counter().current_version();
  }
}

void WatchedWeights::note_update() {
  for (auto& noted : noted_) noted.parameter.unsafeGetTensorImpl()->bump_version();
  note();
}

std::optional<size_t> WatchedWeights::moved() const {
  for (size_t i = 0; i < noted_.size(); ++i) {
    const auto& [parameter, data, sizes, strides, version] = noted_[i];
    if (parameter.const_data_ptr() != data || parameter.sizes() != sizes || parameter.strides() != strides) return i;
  }
  return std::nullopt;
}

std::optional<size_t> WatchedWeights::written() const {
  for (size_t i = 0; i < noted_.size(); ++i) {
    const auto& [parameter, data, sizes, strides, version] = noted_[i];
    if (parameter.unsafeGetTensorImpl()->version_counter().current_version() != version) return i;
  }
  return std::nullopt;
}

std::string WatchedWeights::gradients() const {
  std::string found(noted_.size(), '\0');
  for (size_t i = 0; i < noted_.size(); ++i) {
    const at::Tensor& gradient = noted_[i].parameter.grad();
    if (gradient.defined()) found[i] = gradient.layout() == at::kStrided ? '\1' : '\2';
  }
  return found;
}

void WeightSlices::take_gradients() {
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

void WeightSlices::drop_gradients() {
  for (auto& slice : slices_) slice.tensor.mutable_grad() = at::Tensor();
}

}  // namespace syncengine
