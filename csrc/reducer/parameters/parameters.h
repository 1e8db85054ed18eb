// The parameters of one model, as long as it lives: how they are followed from forward to forward, and their hooks.
//
// Ownership: holds the parameters and the hooks. Thread-safety: the reducer's lock. Failure: none.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "reducer/gradients/gradient.h"
#include "reducer/torch/attributes.h"
#include "reducer/torch/graph_tasks.h"
#include "reducer/torch/hooks.h"
#include "steps/bucket_plan.h"
#include "steps/forwards.h"

namespace syncengine {

class Parameters {
 public:
  // `sparse` says for each parameter whether its gradients are of sparse layout.
  Parameters(std::vector<at::Tensor> tensors, ModelNames names, const std::vector<bool>& sparse);

  size_t size() const { return gradients_.size(); }
  const std::shared_ptr<const ModelNames>& names() const { return names_; }
  std::vector<Gradient>& gradients() { return gradients_; }
  const at::Tensor& tensor(size_t index) const { return gradients_[index].parameter(); }
  const Accumulators& accumulators() const { return accumulators_; }

  // Facts about the parameters as they are now. BucketPlan and Forwards ask for them, as their `sees`.
  Footprint footprint(size_t index) const {
    return {tensor(index).nbytes(), static_cast<int>(tensor(index).scalar_type())};
  }
  bool is_trained(size_t index) const { return tensor(index).requires_grad(); }
  // Whether the graph task on this thread comes from `forward`.
  bool is_in_this_task(const Forward& forward) const {
    return forward.reached || std::any_of(forward.outputs.begin(), forward.outputs.end(), syncengine::is_in_this_task);
  }
  void add_reached(std::vector<bool>& reachable) const {
    for (const auto& [node, index] : accumulators_)
      if (!reachable[index] && syncengine::is_in_this_task(node)) reachable[index] = true;
  }
  std::vector<Fact> facts() const;

  // Called before and after a forward. Makes `reducer` listen to each parameter that requires a gradient, even when it
  // is frozen later: an older graph may bring its gradient once it is unfrozen. Returns whether any has changed.
  bool follow(const std::shared_ptr<AutogradListener>& reducer);
  // The parameters that a plan must have. All ranks find the same, so only facts count that all ranks share.
  std::vector<size_t> wanted() const;
  // Whether `plan` covers exactly the parameters of wanted(), with the sizes and dtypes that they have now.
  bool are_covered_by(const BucketPlan& plan) const;
  // With `keep`, wanted() includes frozen parameters, too, that required a gradient when the model was wrapped, or were
  // in a plan: as under DDP with unused parameters.
  void keep_trained(bool keep) { keeps_trained_ = keep; }
  void note_trained(const BucketPlan& plan) {
    for (size_t i : plan.covered()) trained_[i] = true;
  }
  // Called before forwards whose backwards are this rank's own: their gradients are still to be averaged, until the end
  // of a synchronized backward. Any thread calls accumulated() when such a gradient has come.
  void begin_accumulation() {
    if (std::exchange(accumulates_, true)) return;
    for (auto& accumulated : accumulated_) accumulated.store(false, std::memory_order_release);
  }
  void accumulated(size_t index) { accumulated_[index].store(true, std::memory_order_release); }
  void end_accumulation() { accumulates_ = false; }
  // A parameter in no bucket of `plan`, with a gradient of a backward that did not average, if any. Ranks may differ.
  std::optional<size_t> left_by(const BucketPlan& plan) const;
  // Forgets AccumulateGrad nodes that nobody else holds, so that follow() has them made anew.
  void let_go_of_nodes();
  // Stops listening, and lets the user's hooks run by themselves again.
  void unhook(const AutogradListener& reducer);

  // Whether older graphs, from before a change of dtype or size, may bring gradients.
  bool any_retired() const { return !retired_.empty(); }
  // Whether the user has hooks that run when a gradient is accumulated; they wait for the averages.
  bool any_user_hooks() const { return any_user_hooks_; }
  // Runs the user's hooks on these parameters, whose .grad is averaged now. Called without the reducer's lock.
  void run_user_hooks(const std::vector<size_t>& averaged);
  // Whether the hooks that run now get averages, not this rank's own gradients.
  bool runs_user_hooks() const { return runs_user_hooks_; }
  // Questions to a parameter's GradientHook (see hooks.h); false if the reducer does not listen to the parameter.
  bool has_node_hooks(size_t index) const { return hooks_[index] && hooks_[index]->others_are_users(); }
  bool another_has(size_t index, Interest interest) const {
    return hooks_[index] && hooks_[index]->any_other_has(interest);
  }

 private:
  void follow(const std::shared_ptr<AutogradListener>& reducer, size_t index);
  void unhook(size_t index) {
    accumulators_.erase(hooks_[index]->node());
    hooks_[index].reset();
  }
  bool is_wanted(size_t index) const { return is_trained(index) || (keeps_trained_ && trained_[index]); }

  const std::shared_ptr<const ModelNames> names_;
  std::vector<Gradient> gradients_;
  std::vector<Attributes> attributes_;
  std::vector<std::unique_ptr<GradientHook>> hooks_;    // null until it requires a gradient
  std::vector<std::unique_ptr<GradientHook>> retired_;  // on nodes that only graphs hold
  Accumulators accumulators_;
  std::vector<bool> trained_;
  bool keeps_trained_ = false;
  std::vector<std::atomic<bool>> accumulated_;
  bool accumulates_ = false;
  bool any_user_hooks_ = false;
  std::atomic<bool> runs_user_hooks_{false};
};

}  // namespace syncengine
