// The parameters of one model, as long as the model lives: how they are followed from forward to forward, and the hooks
// on them.
//
// Ownership: holds the parameters and the hooks. Thread-safety: the reducer's lock. Failure: none.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <vector>

#include "reducer/buckets/bucket.h"
#include "reducer/buckets/bucket_plan.h"
#include "reducer/gradients/gradient.h"
#include "reducer/parameters/hooks.h"
#include "reducer/torch/attributes.h"
#include "reducer/torch/unused.h"

namespace syncengine {

class Parameters {
 public:
  // `sparse`, of each: whether its gradients are of sparse layout.
  Parameters(std::vector<at::Tensor> tensors, ModelNames names, const std::vector<bool>& sparse);

  size_t size() const { return gradients_.size(); }
  const std::shared_ptr<const ModelNames>& names() const { return names_; }
  const std::string& model() const { return names_->model; }
  const std::string& name(size_t index) const { return names_->parameters[index]; }
  std::vector<Gradient>& gradients() { return gradients_; }
  const std::vector<Gradient>& gradients() const { return gradients_; }
  const at::Tensor& tensor(size_t index) const { return gradients_[index].parameter(); }
  // The AccumulateGrad nodes that are listened to.
  const AccumulatorIndex& accumulators() const { return accumulators_; }

  // Before a forward: `reducer` listens to each that requires a gradient, or has: a graph from before may bring one
  // when it does again. Returns whether anything was new.
  bool follow(const std::shared_ptr<Reducer>& reducer);
  // Whether each that requires a gradient is in a bucket of `plan`, as it was then, and no other is. All ranks find the
  // same, so nothing counts that only one may know.
  bool are_covered_by(const BucketPlan& plan) const;
  // A forward comes whose backward is this rank's own. What it brings is still to be averaged, also of a parameter that
  // is frozen by then: until the end of a synchronized backward.
  void begin_accumulation();
  void end_accumulation();
  // Those with a gradient from such a backward that are in no bucket of `plan`. Each rank has its own.
  std::vector<size_t> left_by(const BucketPlan& plan) const;
  // How many were ever to be trained, as all ranks know: when the model was wrapped, or in a plan.
  size_t trained() const { return trained_count_; }
  void note_trained(const BucketPlan& plan);
  // Forgets AccumulateGrad nodes that nobody else holds, so that follow() has them made anew.
  void let_go_of_nodes();
  // Listens to none, and lets users' hooks run by themselves again.
  void unhook(const Reducer& reducer);

  // Whether graphs from before a change of dtype or size may bring gradients.
  bool any_retired() const { return !retired_.empty(); }
  // Hooks of the user that run when a gradient is accumulated; they wait for the averages.
  bool any_user_hooks() const { return any_user_hooks_; }
  // See hooks.h, of one that is listened to.
  bool has_node_hooks(size_t index) const { return hooks_[index] && hooks_[index]->others_are_users(); }
  bool claimed_by_another(size_t index) const { return hooks_[index] && hooks_[index]->claimed_by_another_reducer(); }
  bool awaited_by_another(size_t index) const { return hooks_[index] && hooks_[index]->awaited_by_another_reducer(); }

 private:
  void follow(const std::shared_ptr<Reducer>& reducer, size_t index);
  void retire(size_t index);
  void unhook(size_t index);

  const std::shared_ptr<const ModelNames> names_;
  std::vector<Gradient> gradients_;
  std::vector<Attributes> attributes_;
  std::vector<std::unique_ptr<GradientHook>> hooks_;    // none until it requires a gradient
  std::vector<std::unique_ptr<GradientHook>> retired_;  // on nodes that graphs hold, and parameters no longer
  AccumulatorIndex accumulators_;
  std::vector<bool> accumulates_, trained_;
  bool any_accumulates_ = false;
  size_t trained_count_ = 0;
  bool any_user_hooks_ = false;
};

}  // namespace syncengine
