#include "reducer/gradient.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>

#include "base/error.h"
#include "reducer/cpu_allocator.h"

namespace syncengine {

namespace {

// In the parameter's own layout if that is dense, otherwise contiguous: the order of elements that all ranks agree on.
at::Tensor empty_like_parameter(const at::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) {
    return at::empty_strided(parameter.sizes(), parameter.strides(), parameter.options());
  }
  return at::empty(parameter.sizes(), parameter.options());
}

bool follows_layout(const at::Tensor& grad, const at::Tensor& parameter) {
  if (parameter.is_contiguous() && grad.is_contiguous()) return true;  // by far the most frequent case
  return torch::autograd::utils::obeys_layout_contract(grad, parameter);
}

// Since torch 2.10 a tensor's Python wrapper counts as one of its holders, also when Python itself has let go of it.
template <class Slot>
bool python_let_go(const Slot* slot) {
  if constexpr (requires { slot->has_unique_reference(); }) return slot->has_unique_reference();
  return false;
}

// True if `tensor` is held by one C++ reference and by nothing in Python.
bool has_one_holder(const at::TensorBase& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  return tensor.use_count() == 1 || (tensor.use_count() == 2 && python_let_go(impl->pyobj_slot()));
}

bool shares_storage(const at::TensorBase& a, const at::TensorBase& b) {
  return b.defined() && b.has_storage() && a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

// Whether `grad`, which took over the memory of `incoming`, is all that will ever look at that memory: every holder is
// known, and goes with `incoming`, which the engine is about to drop; and the memory itself is torch's (not, say, a numpy
// array's).
bool took_over_exclusively(const at::Tensor& grad, const at::Tensor& incoming) {
  if (!has_one_holder(incoming)) return false;
  size_t known_holders = 2;
  if (incoming.is_view()) {  // the weight of every nn.Linear: the transpose of a product
    const at::TensorBase& base = incoming._base();
    if (has_one_holder(base) && shares_storage(grad, base)) ++known_holders;
  }
  const auto& storage = grad.storage();
  return storage.use_count() == known_holders && gradient_memory::is_tensor_memory(storage.data_ptr());
}

void check_reducible(const at::Tensor& grad, const at::Tensor& parameter, const std::string& name) {
  if (grad.layout() != c10::kStrided) {
    throw Error(ErrorKind::InvalidUsage,
                "parameter " + name + " got a " + c10::str(grad.layout()) +
                    " gradient; only dense gradients are supported (for nn.Embedding: sparse=False)");
  }
  if (grad.scalar_type() != parameter.scalar_type() || !grad.is_cpu()) {
    throw Error(ErrorKind::InvalidUsage, "the gradient of parameter " + name + " is " + c10::str(grad.scalar_type()) +
                                             " on " + grad.device().str() + ", but the parameter is " +
                                             c10::str(parameter.scalar_type()) + " on cpu; both must agree");
  }
}

}  // namespace

void Gradient::collect(const at::Tensor& incoming, const std::string& name, Statistics& statistics) {
  const at::Tensor& grad = parameter_.grad();
  if (!grad.defined()) return collect_unused(statistics);
  check_reducible(grad, parameter_, name);
  if (!follows_layout(grad, parameter_)) {
    copy_out(Source::Copy, CopyReason::Layout, grad, statistics);
  } else if (grad.requires_grad()) {
    copy_out(Source::Copy, CopyReason::Graph, grad, statistics);
  } else if (shares_storage(grad, incoming) && !took_over_exclusively(grad, incoming)) {
    copy_out(Source::Replace, CopyReason::SharedStorage, grad, statistics);
  } else {
    // Either taken over from `incoming`, or a .grad that existed before (or was made by a copy) and that autograd itself
    // has just written: no tensor of this backward lies in it.
    source_ = Source::Own;
    memory_ = grad;
  }
}

void Gradient::collect_unused(Statistics& statistics) {
  copy_out(Source::Unused, CopyReason::Unused, parameter_.grad(), statistics);
}

void Gradient::collect_absent() {
  at::NoGradGuard no_grad;
  source_ = Source::Absent;
  memory_ = empty_like_parameter(parameter_).zero_();
}

void Gradient::weigh(double weight) {
  if (weight == 0.0) {
    memory_.zero_();
  } else {
    memory_.mul_(weight);
  }
}

void Gradient::copy_out(Source source, CopyReason reason, const at::Tensor& grad, Statistics& statistics) {
  at::NoGradGuard no_grad;
  source_ = source;
  memory_ = empty_like_parameter(parameter_);
  if (grad.defined()) {
    memory_.copy_(grad);
  } else {
    memory_.zero_();
  }
  statistics.count_copy(reason, memory_.nbytes());
}

void Gradient::deliver(bool used) {
  at::NoGradGuard no_grad;
  at::Tensor& grad = parameter_.mutable_grad();
  if (source_ == Source::Absent || (source_ == Source::Unused && !used)) {
    // Nobody used it: as DDP, leave .grad alone.
  } else if (!grad.defined()) {
    grad = memory_;
  } else if (source_ == Source::Replace) {
    grad.set_data(memory_);
  } else if (!grad.is_same(memory_)) {
    grad.copy_(memory_);
  }
  source_ = Source::None;
  memory_.reset();
}

void Gradient::discard() {
  if (source_ != Source::Absent) parameter_.mutable_grad().reset();
  source_ = Source::None;
  memory_.reset();
}

}  // namespace syncengine
