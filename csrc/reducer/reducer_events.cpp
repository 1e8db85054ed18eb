// What autograd's hooks tell the Reducer while backward runs.
//
// Callbacks run at the end of the graph task they were queued in. Reentrant checkpointing nests tasks, and an inner one
// may end before later hooks run or bring the last gradient itself. So each task that we see gets a callback, and the
// first to find all buckets announced finalizes. That may be an inner task: nothing written here is read by an outer
// one.
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "reducer/backward/backward.h"
#include "reducer/parameters/hooks.h"
#include "reducer/reducer.h"
#include "steps/texts.h"

namespace syncengine {

namespace {

// True in backward() without `inputs`: it accumulates into every leaf. autograd.grad() and backward(inputs=...) do not.
bool whole_graph_runs() {
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  return chosen == nullptr || chosen->empty();
}

// Whether what reaches this AccumulateGrad goes into .grad: in autograd.grad() it does not, nor in
// backward(inputs=...) without this leaf.
bool accumulates(const torch::autograd::Node* node) {
  if (whole_graph_runs()) return true;
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  const auto found = chosen->find(const_cast<torch::autograd::Node*>(node));
  return found != chosen->end() && found->second.needed_;
}

// Whether this backward accumulates into one of `parameters`.
bool accumulates_into(const Parameters& parameters) {
  const auto& nodes = parameters.accumulators();
  return whole_graph_runs() ||
         std::any_of(nodes.begin(), nodes.end(), [](const auto& node) { return accumulates(node.first); });
}

}  // namespace

void Reducer::on_output(Forward* forward) {
  std::shared_ptr<Backward> backward;
  {
    std::lock_guard lock(mutex_);
    if (forward == nullptr) {
      if (!accumulates_into(model_->parameters)) return;
      model_->outcome.not_averaged = "the last backward was this rank's own (no_sync)";
      ++model_->backwards;
      return model_->pool_gradients();
    }
    if (!whole_graph_runs()) return;
    if (phase_ == Phase::Consumed) {
      refuse_backward(forward->given_up);
    }
    if (phase_ != Phase::Armed) return;
    forward->reached = claimed_ = true;
    model_->pool_gradients();
    // From here on the peers expect us: an error anywhere in this backward must reach them.
    watch_this_backward();
    // If no parameter at all is used here, no other hook will run.
    if (model_->usage.tracks()) {
      begin_backward();
      model_->backward->collect_missing();
      backward = model_->backward;
    }
  }
  if (backward) model_->route->proceed(*backward, mutex_);
}

void Reducer::refuse_backward(const std::string& lost) {
  const Error error(ErrorKind::InvalidUsage, consumed_text(names(), lost));
  // No rank leaves a step of micro-batches alone. Where the forward was given up, the others know.
  if (model_->step && lost.empty()) model_->averaging.tell_peers(error.what(), error.kind());
  throw error;
}

void Reducer::watch_this_backward() {
  if (!tasks_.watch()) return;
  queue_backward_end(shared_from_this(), model_->record.statistics.backwards + (phase_ == Phase::Armed), forwards_);
  // Where on_output watches the outermost one, that is known already.
  if (!outputs_hooked_) tell_of_outer_task(weak_from_this(), TaskRole::Ours);
}

bool Reducer::runs_forwards_graph() {
  if (tasks_.is_new()) tell_of_outer_task(weak_from_this(), TaskRole::Foreign);
  return tasks_.runs_forwards_nodes();
}

bool Reducer::takes(size_t index) {
  const Parameters& parameters = model_->parameters;
  const at::Tensor& parameter = parameters.tensor(index);
  if (!parameter.requires_grad() && !model_->plan.covers(index)) return false;  // frozen: its node was run for nothing
  const Phase phase = phase_;
  Circumstances here{.phase = phase};
  if (model_->usage.finds_unused() && parameter.grad().defined()) model_->usage.note(index);
  if (phase == Phase::Armed) {
    here.claimed = claimed_;
    here.claimed_elsewhere = !claimed_ && parameters.another_has(index, Interest::Claims);
  } else if (phase == Phase::Consumed) {
    here.in_our_task = tasks_.any();
    here.given_up = model_->outcome.is_ending();
    here.outputs_hooked = outputs_hooked_;
    here.awaited_elsewhere = parameters.another_has(index, Interest::Awaits);
    here.made_by_forward =
        !here.in_our_task && !here.outputs_hooked && !here.awaited_elsewhere && runs_forwards_graph();
  }
  switch (attribute(here)) {
    case Attribution::Foreign: return false;
    case Attribution::Local:
      PhaseClock::of_process().local_gradient();
      model_->parameters.accumulated(index);
      return false;
    case Attribution::First:
      model_->thaw();
      watch_this_backward();
      begin_backward();
      model_->backward->collect_missing();
      return true;
    case Attribution::Mine: watch_this_backward(); return true;
    case Attribution::TooLate:
      model_->averaging.tell_peers(collected_twice_text(names(), index));
      throw Error(ErrorKind::InvalidUsage, collected_twice_text(names(), index));
    case Attribution::GivenUp: throw Error(ErrorKind::Aborted, model_->outcome.last_error);
    case Attribution::Consumed: refuse_backward(model_->outcome.why_lost());
  }
  return false;
}

void Reducer::on_gradient(size_t index, const at::Tensor& incoming) {
  if (phase_.load(std::memory_order_acquire) == Phase::Local && !model_->options.find_unused_parameters) {
    PhaseClock::of_process().local_gradient();
    return model_->parameters.accumulated(index);
  }
  std::shared_ptr<Backward> backward;
  {
    std::lock_guard lock(mutex_);
    if (!takes(index)) return;
    backward = model_->backward;
    try {
      if (!backward->bring(index, incoming)) return;
    } catch (const Error& error) {
      give_up(error.what());
      throw;
    }
  }
  model_->route->proceed(*backward, mutex_);
}

void Reducer::on_backward_end() {
  {
    std::lock_guard lock(mutex_);
    tasks_.ended();
    model_->outcome.brought_nothing = phase_ == Phase::Armed;
    if (phase_ == Phase::Armed) claimed_ = false;
    // An inner task has finalized: this one may go on another stream.
    if (model_->flat && phase_ == Phase::Consumed) model_->flat->join();
    if (phase_ != Phase::Syncing) return;
    // The outermost task ends last: only then all hooks have fired. It is the one that on_output watches.
    const bool observed_now = model_->usage.observes() && !tasks_.any() && (outputs_hooked_ || tasks_.is_outermost());
    if (!model_->backward->collected_all() && !observed_now) return;
    model_->record.begin_wait();
    phase_ = Phase::Finalizing;
  }
  finalize();
}

void Reducer::on_backward_failed(const std::string& text) noexcept {
  try {
    std::lock_guard lock(mutex_);
    if (phase_ == Phase::Armed || phase_ == Phase::Syncing) give_up(text);
  } catch (...) {
    // The error that is on its way says more.
  }
}

void Reducer::on_task_failed(uint64_t backward, uint64_t forwards) noexcept {
  try {
    std::lock_guard lock(mutex_);
    tasks_.ended();
    const bool is_later = forwards != forwards_;  // a task may be kept beyond its backward
    if (!is_later && (phase_ == Phase::Armed || phase_ == Phase::Syncing)) give_up("backward aborted");
    if (model_->outcome.has_ended_well(backward)) {
      give_up(dropped_text(names()), Where::BehindAverages, /*keeps=*/is_later);
    }
  } catch (...) {
    // In a destructor, on the way of the error that ended this backward.
  }
}

void Reducer::on_outer_task(TaskRole of_inner) noexcept {
  try {
    std::lock_guard lock(mutex_);
    if (of_inner == TaskRole::Ours) {
      // The average may have been delivered, and the task around it be one that only happens to run a backward.
      if (phase_ == Phase::Syncing || tasks_.runs_forwards_nodes()) watch_this_backward();
      return;
    }
    if (phase_ == Phase::Consumed && !tasks_.any() && runs_forwards_graph())
      fail_at_task_end(consumed_text(names(), model_->outcome.why_lost()));
  } catch (...) {
    // In a destructor, on the way of the error that ended the inner one.
  }
}

}  // namespace syncengine
