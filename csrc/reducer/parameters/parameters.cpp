#include "reducer/parameters/parameters.h"

#include <c10/util/ScopeExit.h>

namespace syncengine {

Parameters::Parameters(std::vector<at::Tensor> tensors, ModelNames names, const std::vector<bool>& sparse)
    : names_(std::make_shared<const ModelNames>(std::move(names))),
      hooks_(tensors.size()),
      trained_(tensors.size()),
      accumulated_(tensors.size()) {
  gradients_.reserve(tensors.size());
  attributes_.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    trained_[i] = tensors[i].requires_grad();
    attributes_.emplace_back(tensors[i]);
    gradients_.emplace_back(std::move(tensors[i]), sparse[i]);
  }
}

std::vector<Fact> Parameters::facts() const {
  std::vector<Fact> facts;
  facts.reserve(size());
  for (const Gradient& gradient : gradients_) {
    const at::ScalarType type = gradient.parameter().scalar_type();
    facts.push_back({.footprint = footprint(facts.size()),
                     .dtype = gradient_dtype(type),
                     .type_name = c10::toString(type),
                     .order = gradient.order().hash(),
                     .sparse = gradient.sparse()});
  }
  return facts;
}

bool Parameters::follow(const std::shared_ptr<AutogradListener>& reducer) {
  constexpr size_t kSoon = 16, kNext = 8;
  bool news = false;
  std::erase_if(retired_,
                [this](const auto& hook) { return hook->is_alone() && accumulators_.erase(hook->node()) > 0; });
  for (size_t i = 0; i < attributes_.size(); ++i) {
    if (i + kSoon < attributes_.size()) attributes_[i + kSoon].prefetch_tensor();
    if (i + kNext < attributes_.size()) attributes_[i + kNext].prefetch_autograd();
    if (!attributes_[i].changed()) continue;
    follow(reducer, i);
    attributes_[i].changed();  // the reducer's own hooks are no news
    news = true;
  }
  return news;
}

// A parameter has an AccumulateGrad node when it requires a gradient, and torch may replace the node: when `.data`
// changes its dtype, say, even if the dtype changes back (model.bfloat16(), model.float()). A node of another size
// can't be used again. Older graphs still use the old node, so a retired one never becomes a parameter's again.
void Parameters::follow(const std::shared_ptr<AutogradListener>& reducer, size_t index) {
  const at::Tensor& parameter = tensor(index);
  auto& hook = hooks_[index];
  const bool wanted = parameter.requires_grad();
  if (wanted && postpone_user_hooks(reducer, parameter)) any_user_hooks_ = true;
  if (hook && !hook->fits(parameter)) {
    hook->take_node_from(parameter);
    if (hook->is_alone())
      unhook(index);
    else
      retired_.push_back(std::move(hook));
  }
  if (wanted && !hook) {
    hook = std::make_unique<GradientHook>(*reducer, index, parameter);
    accumulators_[hook->node()] = index;
  }
}

std::vector<size_t> Parameters::wanted() const {
  std::vector<size_t> wanted;
  for (size_t i = 0; i < size(); ++i) {
    if (is_wanted(i)) wanted.push_back(i);
  }
  return wanted;
}

bool Parameters::are_covered_by(const BucketPlan& plan) const {
  for (size_t i = 0; i < size(); ++i) {
    if (is_wanted(i) != plan.covers(i) || (plan.covers(i) && !plan.fits(i, footprint(i)))) return false;
  }
  return true;
}

std::optional<size_t> Parameters::left_by(const BucketPlan& plan) const {
  if (!accumulates_ || plan.covered().empty() || plan.covered().size() == size()) return std::nullopt;
  for (size_t i = 0; i < size(); ++i) {
    if (accumulated_[i].load(std::memory_order_acquire) && !plan.covers(i) && tensor(i).grad().defined()) return i;
  }
  return std::nullopt;
}

void Parameters::run_user_hooks(const std::vector<size_t>& averaged) {
  runs_user_hooks_ = true;
  const auto running = c10::make_scope_exit([this] { runs_user_hooks_ = false; });
  for (size_t i : averaged) syncengine::run_user_hooks(tensor(i));
}

void Parameters::let_go_of_nodes() {
  for (size_t i = 0; i < hooks_.size(); ++i) {
    if (!hooks_[i] || !hooks_[i]->is_alone()) continue;
    unhook(i);
    attributes_[i].forget();
  }
}

void Parameters::unhook(const AutogradListener& reducer) {
  accumulators_.clear();
  retired_.clear();
  for (size_t i = 0; i < hooks_.size(); ++i) {
    hooks_[i].reset();
    attributes_[i].forget();
    restore_user_hooks(reducer, tensor(i));
  }
}

}  // namespace syncengine
