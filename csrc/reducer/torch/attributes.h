// The attributes of a parameter that the reducer follows from forward to forward: whether it requires a gradient, its
// dtype and size, its AccumulateGrad node (torch makes a new one when `.data` changes dtype, which would have no hook),
// and the user's hooks. Ten thousand parameters are asked in a row, so asking must be cheap if nothing has changed. The
// cost is that neither a tensor nor its autograd data is in the cache.
//
// Ownership: views; the parameters outlive them. Thread-safety: as a parameter's. Failure: none.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace syncengine {

class Attributes {
 public:
  explicit Attributes(const at::Tensor& parameter) : tensor_(parameter.unsafeGetTensorImpl()) {}

  // Two prefetches: the tensor of a parameter that comes soon, then the autograd data of the one that comes next.
  void prefetch_tensor() const {
    __builtin_prefetch(tensor_);
    __builtin_prefetch(reinterpret_cast<const char*>(tensor_) + kDtypeAt);
  }
  void prefetch_autograd() const {
    const auto* meta = reinterpret_cast<const char*>(tensor_->autograd_meta());
    __builtin_prefetch(meta + kNodeAt);
    __builtin_prefetch(meta + kFlagsAt);
  }

  // Whether any attribute has changed since the last call; true the first time.
  bool changed() {
    auto* meta = static_cast<const torch::autograd::AutogradMeta*>(tensor_->autograd_meta());
    Values now{.dtype = tensor_->dtype(),
               .elements = tensor_->numel(),
               .node = meta ? address(meta->grad_accumulator_) : nullptr,
               .hooks = meta ? meta->post_acc_grad_hooks_.get() : nullptr,
               .requires_grad = meta && meta->requires_grad_};
    if (now == last_) return false;
    last_ = now;
    return true;
  }
  // Makes the next changed() return true.
  void forget() { last_ = {}; }

 private:
  static constexpr size_t kDtypeAt = 128, kNodeAt = 64,
                          kFlagsAt = 128;  // where these lie in torch's objects, by cache lines; a guess does no harm
  struct Values {
    caffe2::TypeMeta dtype;
    int64_t elements = -1;
    const void* node = nullptr;
    const void* hooks = nullptr;
    bool requires_grad = false;
    bool operator==(const Values&) const = default;
  };

  // The address that a weak pointer holds, which may be gone, so it is only compared. lock() would cost an atomic
  // exchange. This is a weak_intrusive_ptr since torch 2.13, a weak_ptr before; in both the pointer comes first.
  static const void* address(const auto& weak) {
    const void* pointer;
    std::memcpy(&pointer, &weak, sizeof pointer);
    return pointer;
  }

  c10::TensorImpl* tensor_;
  Values last_;
};

}  // namespace syncengine
