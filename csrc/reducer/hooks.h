// Where the reducer listens to autograd. Translation only: every hook calls one method of Reducer and turns its errors into
// Python's.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "reducer/cpu_allocator.h"

namespace syncengine {

class Reducer;

// Listens to a parameter as long as it lives: on its AccumulateGrad node, after the gradient has been accumulated.
// Must not outlive the reducer, nor be destroyed while a backward runs through the parameter.
class GradientHook {
 public:
  GradientHook(Reducer& reducer, size_t index, const at::Tensor& parameter);
  ~GradientHook();
  GradientHook(const GradientHook&) = delete;
  GradientHook& operator=(const GradientHook&) = delete;

  const torch::autograd::Node* node() const { return node_.get(); }
  at::ScalarType dtype() const { return dtype_; }  // the parameter's when it was hooked

 private:
  // An intrusive_ptr since torch 2.13, a shared_ptr before. Held: a parameter refers to its node only weakly.
  decltype(torch::autograd::impl::grad_accumulator(at::Tensor())) node_;
  uintptr_t key_;
  at::ScalarType dtype_;
};

// Listens to the start of the backward that goes through `output`: `call` runs. False if it has no graph.
bool hook_output(const std::weak_ptr<Reducer>& reducer, const at::Tensor& output, void (Reducer::*call)());

// The graph task on this thread uses `grant` until it ends; if it ends well, the grant learns from it.
void use_in_this_task(const std::shared_ptr<gradient_memory::Grant>& grant);

// Queues Reducer::on_backward_end in the graph task that runs on this thread; on_backward_abandoned is called instead if the
// task ends without it.
void queue_backward_end(std::shared_ptr<Reducer> reducer);

// Users' post-accumulate-grad hooks (an optimizer in backward, say) run before GradientHook, on the local gradient. This
// makes them wait: calls Reducer::postpones(index), and if that is true, runs nothing until run_postponed. False if there are
// none.
bool postpone_user_hooks(const std::weak_ptr<Reducer>& reducer, size_t index, const at::Tensor& parameter);
void run_postponed(const at::Tensor& parameter);
// Undoes postpone_user_hooks.
void restore_user_hooks(const at::Tensor& parameter);

}  // namespace syncengine
