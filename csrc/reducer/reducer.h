// Averages the gradients of one model while its backward still runs: acts on autograd's events. Its state is the Model.
//
//     forward    begin_forward -> the model -> prepare_for_backward, or refuse_forward if it raised
//     backward   on_output, on_gradient for each parameter: collect it; announce its bucket with the last one
//     its end    on_backward_end: wait for the buckets, put the averages into .grad
//
// The Lifecycle, which knows no torch, decides what follows from an event; the Reducer carries that out.
//
// Python plans the buckets (install_plan), from the order in which gradients became ready.
//
// Ownership: shared by Python and by the graph tasks it takes part in; holds the model, and so the parameters and its
// hooks on them. Thread-safety: forward, and backward on any number of threads, one synchronized backward at a time.
// Blocks in on_backward_end, and in begin_forward after a step that was refused. The lock may be held while the GIL is
// taken, so callers must not hold the GIL. Failure: throws Error; autograd's hooks turn it into Python's classes. After
// a failed backward no .grad is half averaged: it is either the average or None.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "reducer/backward/model.h"
#include "reducer/torch/graph_tasks.h"
#include "reducer/torch/hooks.h"
#include "reducer/torch/python_error.h"
#include "steps/lifecycle.h"

namespace syncengine {

class Reducer final : public AutogradListener, public std::enable_shared_from_this<Reducer> {
 public:
  // Makes the model from these arguments of its constructor.
  template <class... Arguments>
  explicit Reducer(Arguments&&... arguments) : model_(std::make_unique<Model>(std::forward<Arguments>(arguments)...)) {}
  ~Reducer();

  // Called when a forward with gradients enabled begins; `synchronize`: its backward will average. Returns true if a
  // plan must be installed before such a forward runs, see CurrentPlan.
  bool begin_forward(bool synchronize);
  // Called when the forward's module has been called. Returns true if another plan must be installed before its
  // backward, since parameters were frozen, unfrozen or changed within it.
  bool follow_parameters();
  // Called when a forward has ended. `outputs` need be complete only to find unused parameters. `began`: when it began,
  // if known. If the outputs don't reach all of the plan's parameters, returns other leaves that they reach, since one
  // may have replaced a parameter; but only if it looks for unused ones, or the last backward brought no gradient.
  std::vector<at::Tensor> prepare_for_backward(const std::vector<at::Tensor>& outputs, const NodeNumber& began);
  // Called instead if the forward's backward will not average: .grad keeps its gradients for a later one that will.
  void prepare_for_local_backward(const std::vector<at::Tensor>& outputs, const NodeNumber& began) {
    for (const auto& output : outputs) hook_output(weak_from_this(), output, nullptr, began);
  }
  // Called when a forward that was to average has raised, or may not. The peers get `text`; `voted`: see give_up().
  void refuse_forward(const std::string& text, bool voted);
  // Called between a forward and a collective of all ranks, such as that of buffers. Makes a step that is only a vote:
  // throws StepRefused if the forward has raised on some rank. Blocks.
  void vote_on_forward();
  // Called after this rank has refused a forward. Blocks until all ranks have decided whether .grad stays as it was
  // before, and makes it None if not. Does nothing once this rank has closed the communicator.
  void decide();
  // Takes part in a synchronized backward of the others without a gradient of its own. Blocks.
  void shadow_backward();
  void check_finalized();
  // Drops a step of several micro-batches: if there was a last forward, no backward of it will come.
  void drop_step();
  // Removes the hooks on parameters: later backwards do not average, and a synchronized forward throws InvalidUsage.
  void remove_hooks();

  // --- Settings

  // Reserves a slot for each operation that a step may announce, and returns the first one. Collective, once, before
  // the first plan; without the lock, since nobody reads slots before that. Blocks. `copy_of` is the first slot of the
  // model that this one is a copy of, if any, the same on all ranks. Throws InvalidUsage on all ranks if none are left.
  uint64_t reserve_slots(std::optional<uint64_t> copy_of);
  // Makes `buckets` the model's BucketPlan. Throws InvalidUsage in the middle of a backward, or without slots.
  void install_plan(const std::vector<std::vector<size_t>>& buckets, bool provisional);
  // At most one of these is called, between backwards. With a hook, all gradients go through the hook. With
  // compression, they travel in a smaller dtype, scaled as torch's compressing hooks do (`divides_first`) or as usual.
  // With the all-reduce hook, they are only scaled as torch's all-reduce hook does.
  void set_comm_hook(std::unique_ptr<c10d::CommHookInterface> hook);
  void set_compression(at::ScalarType type, bool divides_first);
  void set_all_reduce_hook();
  // Must be called before the first backward.
  void set_static_graph();
  // Three settings of the coming backward alone: its mean, that some rank has no batch, and what its end waits for.
  void average_over(double divisor, double weight) { locked()->coming_forward().weighting = {divisor, weight, true}; }
  void expect_shadows() { locked()->coming_forward().has_shadows = true; }
  void install_futures(const std::vector<TorchFuture>& futures);
  // Makes the coming backward complete a step of micro-batches; end_step() returns whether it has.
  void complete_step(const std::shared_ptr<TreeSums>& sums, uint32_t total, uint64_t number) {
    locked()->step = TreeStep{.sums = sums, .total = total, .number = number};
  }
  bool end_step() { return locked()->end_step(); }

  // --- Reads

  std::vector<size_t> wanted() { return locked()->parameters.wanted(); }
  std::vector<size_t> ready_order() { return locked()->record.ready_order; }
  std::string last_error() { return locked()->outcome.last_error; }
  std::string not_averaged() { return locked()->outcome.not_averaged; }
  // The reason why the pool of gradients could not grow, if it could not.
  std::string shortage() {
    const shm::Pool* pool = model_->pooled.pool();
    return pool ? pool->shortage() : "";
  }
  Statistics statistics() { return locked()->record.statistics; }
  std::shared_ptr<StepTimes> step_times() { return locked()->record.step_times; }
  uint64_t backwards() { return locked()->backwards; }
  bool can_refuse() { return locked()->can_refuse(); }
  bool is_undecided() { return locked()->life.is_undecided(); }
  bool knows_order() { return locked()->plan.knows_order(); }
  bool graph_is_static() { return locked()->record.graph_is_static; }
  // Whether the user's hooks that run now get averages. Allocates nothing, since a hook of each parameter may ask.
  bool has_averaged() { return locked()->parameters.runs_user_hooks(); }

  bool has(Interest interest) const override {
    if (interest == Interest::Awaits) return life().awaits();
    return life().claimed() || (interest == Interest::Averages && life().is_unfinished());
  }
  void on_output(Forward* forward) override;
  void on_gradient(size_t index, const at::Tensor& incoming) override;
  void on_backward_end() override;
  void on_backward_failed(const std::string& text) noexcept override;
  void on_task_failed(uint64_t backward, uint64_t forwards) noexcept override;
  void on_outer_task(bool inner_is_ours) noexcept override;

 private:
  // Answers the questions of the concept Sees, by which the Lifecycle decides. Used under the lock.
  struct Facts {
    bool in_task() const { return GraphTasks::inside(); }
    bool in_our_task() const { return reducer.tasks_.any(); }
    bool whole_graph() const { return whole_graph_runs(); }
    bool accumulates() const { return task_accumulates(model().parameters.accumulators()); }
    bool is_outermost() const { return reducer.tasks_.is_outermost(); }
    bool runs_forwards_nodes() const { return reducer.tasks_.runs_forwards_nodes(); }
    bool runs_forwards_graph() const;
    bool claimed_elsewhere(size_t index) const { return model().parameters.another_has(index, Interest::Claims); }
    bool awaited_elsewhere(size_t index) const { return model().parameters.another_has(index, Interest::Awaits); }
    bool collected_all() const;
    bool observes() const { return model().usage.observes(); }
    bool has_failed() const;
    bool has_plan() const { return static_cast<bool>(model().plan); }
    bool all_frozen() const { return model().plan.all_frozen(); }
    bool can_refuse() const { return model().can_refuse(); }
    Model& model() const { return *reducer.model_; }
    Reducer& reducer;
  };
  static_assert(Sees<Facts>);

  // The model, under the lock as long as this object lives.
  struct LockedModel {
    std::unique_lock<std::mutex> lock;
    Model* model;
    Model* operator->() const { return model; }
  };
  LockedModel locked() { return {std::unique_lock(mutex_), model_.get()}; }
  Lifecycle& life() const { return model_->life; }
  bool recomputing() { return life().is_recomputed(Facts{*this}); }
  // Whether the gradient of parameter `index` belongs to a backward that this model averages. The first such gradient
  // begins it. Throws Error if the gradient must not come now.
  bool takes(size_t index);
  // Notes that the next backward may come from the last forward, which has ended, or raised with all parameters frozen.
  void expect_backward();
  // Refuses a second backward through a forward. `lost` says why the first was given up, if it was.
  [[noreturn]] void refuse_backward(const std::string& lost);
  // Throws InvalidUsage while a backward waits for averages.
  void check_not_averaging() const;
  void check_between_backwards(const char* what) const;
  void check_hookable() const;
  void watch_this_backward();
  void begin_backward();
  void finalize();
  const ModelNames& names() const { return *model_->parameters.names(); }
  // The text for a backward that has begun and waits for gradients that did not come.
  std::string unfinished() const;
  // Handles an error on this rank, of which the peers are told: all lose the step. Needs the lock. `keeps`: see lose();
  // `voted`: the peers are in vote_on_forward(), and will queue no bucket.
  using Where = Lifecycle::Where;
  void give_up(const std::string& text, Where where, bool keeps, bool voted = false);
  void give_up(const std::string& text) { give_up(text, Where::Backward, /*keeps=*/false); }
  // Loses the step here, whichever rank has refused it. `keeps`: .grad stays as it is.
  void lose(const std::string& text, bool keeps);
  void drop_backward() {
    model_->forward.reset();
    model_->backward.reset();
  }

  std::mutex mutex_;
  const std::unique_ptr<Model> model_;
  GraphTasks tasks_;
  bool has_hook_ = false;  // a communication hook, or what stands for one
};

}  // namespace syncengine
