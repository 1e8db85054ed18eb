// The reducer's hooks on autograd, and who else listens where they do. A hook calls one method of Reducer, and turns
// its errors into Python's.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "reducer/gradients/gradient_memory.h"
#include "reducer/torch/graph_tasks.h"

namespace syncengine {

class Reducer;
struct Forward;

// Of a reducer, in the gradients that come now.
enum class Interest : uint8_t {
  Claims,    // a backward runs that comes from its outputs
  Averages,  // the same, or the reducer averages a backward that has begun
  Awaits,    // the reducer waits for gradients
};

// Listens to a parameter as long as it lives: on its AccumulateGrad node, after the gradient has been accumulated.
// Must not outlive the reducer, nor be destroyed while a backward runs through the parameter.
class GradientHook {
 public:
  GradientHook(Reducer& reducer, size_t index, const at::Tensor& parameter);
  ~GradientHook();
  GradientHook(const GradientHook&) = delete;
  GradientHook& operator=(const GradientHook&) = delete;

  const torch::autograd::Node* node() const { return node_.get(); }
  // Whether that is the node through which `parameter` gets its gradients now.
  bool fits(const at::Tensor& parameter) const;
  // If it is, of another size perhaps: the parameter gets a new one when it needs one.
  void take_node_from(const at::Tensor& parameter) const;
  // Whether nothing holds the node but hooks like this one, of any reducer: no graph.
  bool is_alone() const;
  // Who else listens to the node: hooks of the user (Megatron's, Apex'), which are to see this rank's own gradient; or
  // another reducer, of a second wrapper of the same module.
  bool others_are_users() const;
  bool any_other_has(Interest interest) const;

 private:
  const Reducer& reducer_;
  // An intrusive_ptr since torch 2.13, a shared_ptr before. Held: a parameter refers to its node only weakly.
  decltype(torch::autograd::impl::grad_accumulator(at::Tensor())) node_;
  uintptr_t key_;
};

// Listens to the start of the backward that goes through `output`: calls Reducer::on_output with `forward`, which lives
// as long as that graph, if there is one. Returns the output's node; null if it has no graph, or one from before the
// forward `began`: that of an input.
const torch::autograd::Node* hook_output(const std::weak_ptr<Reducer>& reducer, const at::Tensor& output,
                                         const std::shared_ptr<Forward>& forward, const NodeNumber& began);

// The graph task on this thread uses `grant` until it ends; if it ends well, the grant learns from it.
void use_in_this_task(const std::shared_ptr<gradient_memory::Grant>& grant);

// Queues Reducer::on_backward_end in the graph task that runs on this thread; on_task_failed is called instead, with
// the numbers, if the task ends without it.
void queue_backward_end(std::shared_ptr<Reducer> reducer, uint64_t backward, uint64_t forwards);

// What gradients of a graph task are: of the synchronized backward, or not averaged since they seem to be none of this
// model's forward.
enum class TaskRole : uint8_t { Ours, Foreign };
// When the graph task on this thread is gone: calls Reducer::on_outer_task in the one around it, if there is one.
void tell_of_outer_task(std::weak_ptr<Reducer> reducer, TaskRole role);
// The graph task on this thread ends with InvalidUsage.
void fail_at_task_end(const std::string& text);

// Users' post-accumulate-grad hooks (an optimizer in backward, say) run before GradientHook, on the local gradient.
// This makes them wait: nothing runs while any reducer that the parameter belongs to awaits gradients; whoever delivers
// the average runs them. False if there are none.
bool postpone_user_hooks(const std::shared_ptr<Reducer>& reducer, const at::Tensor& parameter);
// Whether there are some, and whether they wait: not if they came after the last forward.
enum class UserHooks : uint8_t { None, Postponed, Hasty };
UserHooks user_hooks_on(const at::Tensor& parameter);
// Whether there is an optimizer in backward that does not wait (torch's _apply_optimizer_in_backward).
bool has_hasty_optimizer(const at::Tensor& parameter);
// Those that have waited.
void run_user_hooks(const at::Tensor& parameter);
// Undoes postpone_user_hooks.
void restore_user_hooks(const Reducer& reducer, const at::Tensor& parameter);

}  // namespace syncengine
