#include "reducer/gradients/gradient.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>

#include <utility>

#include "base/error.h"
#include "reducer/gradients/gradient_memory.h"
#include "reducer/torch/graph_tasks.h"

namespace syncengine {

namespace {

// Makes a tensor in the parameter's layout if that is dense, else contiguous: an order on which all ranks agree.
at::Tensor empty_like_parameter(const at::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) {
    return at::empty_strided(parameter.sizes(), parameter.strides(), parameter.options());
  }
  return at::empty(parameter.sizes(), parameter.options());
}

// An empty sparse gradient, as of an embedding table in which no row was looked up.
at::Tensor empty_rows(const at::Tensor& table) {
  auto values = table.sizes().vec();
  values[0] = 0;
  return at::_sparse_coo_tensor_unsafe(at::empty({1, 0}, table.options().dtype(at::kLong)),
                                       at::empty(values, table.options()), table.sizes(), table.options());
}

// Whether the gradient's bytes are its elements in the parameter's order. They are not if its memory holds the
// conjugate, or the negative, of its elements (conj() is lazy).
bool follows_layout(const at::Tensor& grad, const at::Tensor& parameter) {
  if (grad.is_conj() || grad.is_neg()) return false;
  if (parameter.is_contiguous() && grad.is_contiguous()) return true;  // by far the most frequent case
  return has_expected_layout(grad, parameter);
}

void check_reducible(const at::Tensor& grad, const at::Tensor& parameter, c10::Device device, bool sparse,
                     const std::string& name) {
  if (grad.layout() != (sparse ? c10::kSparse : c10::kStrided)) {
    throw Error(
        ErrorKind::InvalidUsage,
        "Expected variable to have " + std::string(sparse ? "sparse" : "dense") + " gradient: parameter " + name +
            " got a " + c10::str(grad.layout()) +
            " one. The weight of an nn.Embedding or nn.EmbeddingBag with sparse=True always gets a sparse one, and "
            "no other parameter does, nor one that is used elsewhere, too");
  }
  if (grad.scalar_type() != parameter.scalar_type() || grad.device() != device) {
    throw Error(ErrorKind::InvalidUsage, "the gradient of parameter " + name + " is " + c10::str(grad.scalar_type()) +
                                             " on " + grad.device().str() + ", but the parameter is " +
                                             c10::str(parameter.scalar_type()) + " on " + device.str() +
                                             "; both must agree, and stay where they were when the module was wrapped");
  }
}

}  // namespace

void Gradient::note(const at::Tensor& incoming, bool kept) {
  const at::Tensor& grad = parameter_.grad();
  if (!grad.defined()) return;
  const bool took_over = grad.layout() == c10::kStrided && shares_storage(grad, incoming);
  took_over_ |= took_over;
  // Others must still see this gradient (`kept`), or may read its memory: no average may be written there yet.
  shared_ |= kept || (took_over && is_shared(grad, incoming));
}

void Gradient::collect(const std::string& name, Statistics& statistics) {
  const at::Tensor& grad = parameter_.grad();
  if (!grad.defined()) return collect_unused(statistics);
  const bool shared = std::exchange(shared_, false), took_over = std::exchange(took_over_, false);
  check_reducible(grad, parameter_, device_, sparse_, name);
  if (!sparse_ && !follows_layout(grad, parameter_)) {
    copy_out(Source::Copy, CopyReason::Layout, grad, statistics);
  } else if (!sparse_ && grad.requires_grad()) {
    copy_out(Source::Copy, CopyReason::Graph, grad, statistics);
  } else if (shared) {
    // A .grad that existed before stays where it is: in a flat optimizer's memory, perhaps.
    copy_out(took_over ? Source::Replace : Source::Copy, CopyReason::SharedStorage, grad, statistics);
  } else {
    // The memory was taken over from `incoming`, or .grad existed before (or was made by a copy) and only autograd has
    // written to it: no other tensor of this backward lies there.
    source_ = Source::Own;
    memory_ = grad;
    version_ = grad._version();
  }
}

void Gradient::collect_absent() {
  at::NoGradGuard no_grad;
  source_ = Source::Absent;
  memory_ = sparse_ ? empty_rows(parameter_) : empty_like_parameter(parameter_).zero_();
}

void Gradient::weigh(double weight) {
  if (weight == 0.0) {
    memory_.zero_();
  } else {
    memory_.mul_(weight);
  }
  version_ = memory_._version();
}

void Gradient::copy_out(Source source, CopyReason reason, const at::Tensor& grad, Statistics& statistics) {
  at::NoGradGuard no_grad;
  source_ = source;
  if (sparse_) {
    memory_ = grad.defined() ? grad.clone() : empty_rows(parameter_);
    return;
  }
  memory_ = empty_like_parameter(parameter_);
  if (grad.defined()) {
    memory_.copy_(grad);
  } else {
    memory_.zero_();
  }
  statistics.count_copy(reason, memory_.nbytes());
}

bool Gradient::deliver(bool used) {
  at::NoGradGuard no_grad;
  at::Tensor& grad = parameter_.mutable_grad();
  const bool delivers = source_ != Source::Absent && (source_ != Source::Unused || used);
  if (!delivers) {
    // No rank used the parameter, or this rank had no batch: .grad stays as it is, as with DDP.
  } else if (!grad.defined()) {
    grad = memory_;
  } else if (source_ == Source::Replace) {
    grad.set_data(memory_);
  } else if (!grad.is_same(memory_)) {
    grad.copy_(memory_);
  }
  forget();
  return delivers;
}

bool Gradient::is_kept() const {
  const at::Tensor& grad = parameter_.grad();
  if (!grad.defined() || !grad.has_storage()) return false;
  auto kept = kept_.lock();
  return kept && kept.get() == grad.storage().unsafeGetStorageImpl();
}

void Gradient::abandon() {
  at::Tensor& grad = parameter_.mutable_grad();
  if (source_ == Source::Own && grad.is_same(memory_) && grad._version() == version_) grad.reset();
  forget();
}

}  // namespace syncengine
