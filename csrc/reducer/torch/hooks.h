// The reducer's hooks on autograd, and what is known of other listeners there. A hook calls one method of an
// AutogradListener, and turns its errors into Python's.
//
// Ownership: as each part says. Thread-safety: a hook runs on its task's thread. Failure: as the AutogradListener's.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "reducer/torch/graph_tasks.h"

namespace syncengine {

struct Forward;

// The kinds of interest that a reducer may have in the gradients that come now. A parameter may have several reducers.
enum class Interest : uint8_t {
  Claims,    // a backward of its outputs is running
  Averages,  // Claims, or the reducer averages a backward that has begun
  Awaits,    // the reducer waits for gradients
};

// The interface by which this folder calls the reducer.
class AutogradListener {
 public:
  // Whether the reducer has this kind of interest now. Called without the reducer's lock.
  virtual bool has(Interest interest) const = 0;
  // Called when a backward reaches an output of `forward`, which is null if that backward does not average.
  virtual void on_output(Forward* forward) = 0;
  virtual void on_gradient(size_t index, const at::Tensor& incoming) = 0;
  virtual void on_backward_end() = 0;
  virtual void on_backward_failed(const std::string& text) noexcept = 0;  // by an error of one of these hooks
  // Called when the graph task has ended by any error, without on_backward_end. See queue_backward_end().
  virtual void on_task_failed(uint64_t backward, uint64_t forwards) noexcept = 0;
  // A graph task has ended, and this thread is back in the one around it. See tell_of_outer_task.
  virtual void on_outer_task(bool inner_is_ours) noexcept = 0;

 protected:
  ~AutogradListener() = default;
};

// Whether `object` has a Python wrapper that nothing in Python holds. Since torch 2.10 a tensor's wrapper counts as one
// of its holders, since 2.13 a node's as well, even when Python itself has let go of it.
bool python_let_go(const auto& object) {
  if constexpr (requires { object.pyobj_slot()->has_unique_reference(); }) {
    return object.pyobj_slot()->has_unique_reference();
  }
  return false;
}

// Listens to a parameter as long as the hook lives: on its AccumulateGrad node, after the gradient has been
// accumulated. Must not outlive the reducer, nor be destroyed while a backward runs through the parameter.
class GradientHook {
 public:
  GradientHook(AutogradListener& listener, size_t index, const at::Tensor& parameter);
  ~GradientHook() { node_->del_post_hook(key_); }
  GradientHook(const GradientHook&) = delete;
  GradientHook& operator=(const GradientHook&) = delete;

  const torch::autograd::Node* node() const { return node_.get(); }
  // Whether this is the node through which `parameter` gets its gradients now.
  bool fits(const at::Tensor& parameter) const;
  // Detaches the node from `parameter`, whose size may have changed, if it is the parameter's: a new one is made on
  // demand.
  void take_node_from(const at::Tensor& parameter) const;
  // Whether nothing holds the node but hooks like this one, of any reducer, so that no graph contains it.
  bool is_alone() const;
  // Whether other listeners on the node are the user's hooks (Megatron's, Apex'), which must see this rank's own
  // gradient; false if they are another reducer's, of a second wrapper of the same module.
  bool others_are_users() const;
  bool any_other_has(Interest interest) const;

 private:
  const AutogradListener& listener_;
  // An intrusive_ptr since torch 2.13, a shared_ptr before. The parameter holds the node only weakly.
  decltype(torch::autograd::impl::grad_accumulator(at::Tensor())) node_;
  uintptr_t key_;
};

// Makes a backward call AutogradListener::on_output with `forward` when it reaches `output`. The hook keeps `forward`
// alive as long as the output's graph. Returns the output's node. Returns null, without a hook, if there is no node, or
// one from before the forward `began`, as that of an input that is returned.
const torch::autograd::Node* hook_output(const std::weak_ptr<AutogradListener>& listener, const at::Tensor& output,
                                         const std::shared_ptr<Forward>& forward, const NodeNumber& began);

// Calls `reached` at the end of the graph task on this thread. The task drops its callbacks when it ends, also when it
// fails: then `gone` is called, with whether `reached` was before.
void at_task_end(std::function<void()> reached, std::function<void(bool)> gone);

// Queues AutogradListener::on_backward_end for the end of the graph task that runs on this thread. If the task ends
// without that call, on_task_failed is called instead, with the same arguments: the number of the backward, and how
// many forwards there have been so far.
void queue_backward_end(std::shared_ptr<AutogradListener> listener, uint64_t backward, uint64_t forwards);

// Calls AutogradListener::on_outer_task in the task around the one on this thread, if any, when this one is gone.
// `is_ours`: its gradients are of the synchronized backward; else they seem to be of no forward of this model.
void tell_of_outer_task(std::weak_ptr<AutogradListener> listener, bool is_ours);
// Makes the graph task on this thread end with InvalidUsage.
void fail_at_task_end(const std::string& text);

// Postpones the user's post-accumulate-grad hooks (an optimizer in backward, say), which would otherwise run before
// GradientHook, on the local gradient. None runs while any reducer of the parameter awaits gradients; the reducer that
// delivers the average runs them. Returns false if there are none.
bool postpone_user_hooks(const std::shared_ptr<AutogradListener>& listener, const at::Tensor& parameter);
// Whether the parameter has such hooks, and whether they wait: hooks that came after the last forward do not.
enum class UserHooks : uint8_t { None, Postponed, Hasty };
UserHooks user_hooks_on(const at::Tensor& parameter);
// Whether the parameter has an optimizer in backward that does not wait (torch's _apply_optimizer_in_backward).
bool has_hasty_optimizer(const at::Tensor& parameter);
void run_user_hooks(const at::Tensor& parameter);
void restore_user_hooks(const AutogradListener& listener, const at::Tensor& parameter);

// Makes these parameters note the gradient that comes, which their post-accumulate hooks are not given, until somebody
// clears their hooks (as Tensor.register_hook does). Not to be called while backward runs.
void note_incoming(const std::vector<at::Tensor>& parameters);
// The noted gradient; undefined if it has been destroyed, or none was noted.
at::Tensor noted_gradient(const at::Tensor& parameter);

}  // namespace syncengine
