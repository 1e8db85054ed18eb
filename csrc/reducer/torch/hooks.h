// The reducer's hooks on autograd, and what is known of other listeners there. A hook calls one method of an
// AutogradListener, and turns its errors into Python's.
//
// Ownership: as each part says. Thread-safety: a hook runs on the thread of its graph task. Failure: a hook throws what
// its AutogradListener does.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "reducer/torch/graph_tasks.h"

namespace syncengine {

struct Forward;

// The interest of a reducer in the gradients that come now.
enum class Interest : uint8_t {
  Claims,    // a backward of its outputs is running
  Averages,  // Claims, or the reducer averages a backward that has begun
  Awaits,    // the reducer waits for gradients
};

// Whether a graph task's gradients belong to the synchronized backward, or are not averaged since they seem to come
// from no forward of this model.
enum class TaskRole : uint8_t { Ours, Foreign };

// The reducer, as this folder calls it.
class AutogradListener {
 public:
  // Whether it has the interest now; asked without a lock.
  virtual bool has(Interest interest) const = 0;
  // A backward reaches an output of `forward`; null: of one whose backward is this rank's own.
  virtual void on_output(Forward* forward) = 0;
  virtual void on_gradient(size_t index, const at::Tensor& incoming) = 0;
  virtual void on_backward_end() = 0;
  virtual void on_backward_failed(const std::string& text) noexcept = 0;  // by an error of one of these hooks
  // The graph task has ended without on_backward_end, by anybody's error. The numbers are those that
  // queue_backward_end was given.
  virtual void on_task_failed(uint64_t backward, uint64_t forwards) noexcept = 0;
  // A graph task has ended, and this thread is back in the one around it. See tell_of_outer_task.
  virtual void on_outer_task(TaskRole of_inner) noexcept = 0;

 protected:
  ~AutogradListener() = default;
};

// Listens to a parameter as long as the hook lives: on its AccumulateGrad node, after the gradient has been
// accumulated. Must not outlive the reducer, nor be destroyed while a backward runs through the parameter.
class GradientHook {
 public:
  GradientHook(AutogradListener& listener, size_t index, const at::Tensor& parameter);
  ~GradientHook();
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
  // An intrusive_ptr since torch 2.13, a shared_ptr before. The hook holds the node, which the parameter does only
  // weakly.
  decltype(torch::autograd::impl::grad_accumulator(at::Tensor())) node_;
  uintptr_t key_;
};

// Listens to the start of the backward that goes through `output`: calls AutogradListener::on_output with `forward`,
// which the hook keeps alive as long as that graph. Returns the output's node; null if it has no graph, or one from
// before the forward `began`, as an input that is returned has.
const torch::autograd::Node* hook_output(const std::weak_ptr<AutogradListener>& listener, const at::Tensor& output,
                                         const std::shared_ptr<Forward>& forward, const NodeNumber& began);

// Calls `reached` at the end of the graph task on this thread. The task drops its callbacks when it ends, also when it
// fails: then `gone` is called, with whether `reached` was before.
void at_task_end(std::function<void()> reached, std::function<void(bool)> gone);

// Queues AutogradListener::on_backward_end in the graph task that runs on this thread. If the task ends without that
// call, on_task_failed is called instead, with the numbers of the backward and of the forwards.
void queue_backward_end(std::shared_ptr<AutogradListener> listener, uint64_t backward, uint64_t forwards);

// Calls AutogradListener::on_outer_task in the task around the one on this thread, if there is one, when this one is
// gone.
void tell_of_outer_task(std::weak_ptr<AutogradListener> listener, TaskRole role);
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
// Runs the user's postponed hooks on `parameter`.
void run_user_hooks(const at::Tensor& parameter);
// Undoes postpone_user_hooks.
void restore_user_hooks(const AutogradListener& listener, const at::Tensor& parameter);

// Makes each of these parameters note the gradient that comes, see note_incoming() of gradients/gradient_memory.h.
void note_next_gradient(const at::Tensor& parameter);
// The noted gradient; undefined if it has been destroyed, or none was noted.
at::Tensor noted_gradient(const at::Tensor& parameter);

}  // namespace syncengine
