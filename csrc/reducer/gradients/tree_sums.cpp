#include "reducer/gradients/tree_sums.h"

#include <ATen/core/grad_mode.h>

#include <utility>

#include "reducer/torch/tensors.h"

namespace syncengine {

at::Tensor add_sparse(const at::Tensor& left, const at::Tensor& right) {
  if (!is_narrow(left)) return (left + right).coalesce();
  return (left.to(at::kFloat) + right.to(at::kFloat)).coalesce().to(left.scalar_type()).coalesce();
}

bool TreeSums::take(size_t merges) {
  at::NoGradGuard no_grad;
  bool any = false;
  std::vector<WaitingSum> taken(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& grad = parameters_[i].mutable_grad();
    if (!grad.defined()) continue;
    any = true;
    taken[i].value = grad.is_sparse() ? grad.coalesce() : grad;
    grad.reset();
  }
  sums_.push_back(std::move(taken));
  for (; merges > 0; --merges) {
    std::vector<WaitingSum> right = std::move(sums_.back());
    sums_.pop_back();
    for (size_t i = 0; i < right.size(); ++i) merge(sums_.back()[i], std::move(right[i]));
  }
  return any;
}

// Adds two sums, whose order does not matter. Zeros are added, too: they turn -0.0 into 0.0.
void TreeSums::merge(WaitingSum& left, WaitingSum right) {
  if (!left.value.defined() || (right.made && !left.made)) std::swap(left, right);
  if (!left.value.defined()) return;
  if (left.value.is_sparse()) {
    if (right.value.defined()) left = {add_sparse(left.value, right.value), true};
  } else if (!right.value.defined()) {
    left = {left.made ? left.value.add_(0) : left.value.add(0), true};
  } else {
    left = {left.made ? left.value.add_(right.value) : left.value.add(right.value), true};
  }
}

at::Tensor TreeSums::complete(size_t index, at::Tensor gradient) const {
  at::NoGradGuard no_grad;
  for (auto sums = sums_.rbegin(); sums != sums_.rend(); ++sums) {
    const at::Tensor& waiting = (*sums)[index].value;
    if (gradient.is_sparse()) {
      gradient = gradient.coalesce();
      if (waiting.defined()) gradient = add_sparse(gradient, waiting);
    } else if (waiting.defined()) {
      gradient.add_(waiting);
    } else {
      gradient.add_(0);
    }
  }
  return gradient;
}

void TreeSums::deliver(double divisor) {
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    auto& [value, made] = sums_.at(0)[i];
    if (!value.defined()) continue;
    if (!made) value = value.resolve_conj().resolve_neg().clone();
    scale(elements_of(value), 1.0 / divisor);
    parameters_[i].mutable_grad() = std::move(value);
  }
  sums_.clear();
}

}  // namespace syncengine
