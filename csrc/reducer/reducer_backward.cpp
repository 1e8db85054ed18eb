// The Reducer while backward runs: what autograd's hooks tell it.
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include "base/error.h"
#include "reducer/peers.h"
#include "reducer/reducer.h"

namespace syncengine {

namespace {

// True in backward() without `inputs`: it accumulates into every leaf. autograd.grad() and backward(inputs=...) do not.
bool whole_graph_runs() {
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  return chosen == nullptr || chosen->empty();
}

}  // namespace

void Reducer::on_output(Forward& forward) {
  std::shared_ptr<Backward> backward;
  {
    std::lock_guard lock(mutex_);
    if (!whole_graph_runs()) return;
    if (phase_ == Phase::Consumed) throw_consumed();
    if (phase_ != Phase::Armed) return;
    forward.reached = claimed_ = true;
    pool_gradients();
    // From here on the peers expect us: an error anywhere in this backward must reach them.
    watch_this_backward();
    // If no parameter at all is used here, no other hook will run.
    if (tracks_usage()) {
      begin_backward();
      collect_missing();
      backward = backward_;
    }
  }
  if (backward) backward->proceed(mutex_);
}

void Reducer::on_local_output() {
  std::lock_guard lock(mutex_);
  not_averaged_ = "the last backward was this rank's own (no_sync)";
  pool_gradients();
}

void Reducer::pool_gradients() {
  if (!plan_ || plan_->buckets().empty()) return;
  pooled_.use_in_this_task(parameters_.tensor(plan_->buckets()[0]->parameters[0]).grad().defined());
}

void Reducer::watch_this_backward() {
  if (tasks_.watch())
    queue_backward_end(shared_from_this(), averaging_.statistics.backwards + (phase_ == Phase::Armed));
}

bool Reducer::postpones(size_t index) const {
  std::lock_guard lock(mutex_);
  return is_planned(index) && (phase_ == Phase::Armed || phase_ == Phase::Syncing);
}

void Reducer::on_gradient(size_t index, const at::Tensor& incoming) {
  if (phase_.load(std::memory_order_relaxed) == Phase::Local && !options_.find_unused_parameters)
    return;  // this thread's
  std::shared_ptr<Backward> backward;
  {
    std::lock_guard lock(mutex_);
    if (finds_unused() && parameters_.tensor(index).grad().defined()) usage_.note(index);
    switch (phase_) {
      case Phase::Local: return;
      case Phase::Finalizing: fail(collected_twice_text(index));
      case Phase::Consumed:
        if (given_up_ && tasks_.any()) throw Error(ErrorKind::Aborted, given_up_->reason.text);  // on another thread
        if (tasks_.any()) fail(collected_twice_text(index));
        if (!outputs_hooked_) throw_consumed();  // as far as one can tell
        return;                                  // a backward that is none of ours: on_output has not run
      case Phase::Armed:
        // Nor is one that comes from another wrapper of the same module.
        if (!claimed_ && parameters_.claimed_by_another(index)) return;
        watch_this_backward();
        begin_backward();
        collect_missing();
        break;
      case Phase::Syncing: watch_this_backward();
    }
    const bool watched = parameters_.has_node_hooks(index);
    if (has_hasty_user_hooks(parameters_.tensor(index)) ||
        (watched && has_hasty_optimizer(parameters_.tensor(index)))) {
      fail("a hook was registered on parameter " + parameters_.name(index) + " of " + parameters_.model() +
           " (register_post_accumulate_grad_hook, or an optimizer in backward) after the forward, so it would see this "
           "rank's gradient instead of the average: register it before the forward");
    }
    if (static_graph_ && !is_last_fire(index, incoming, watched)) return;
    Gradient& gradient = parameters_.gradients()[index];
    if (gradient.collected() || !is_planned(index)) fail(collected_twice_text(index));
    try {
      if (static_graph_) {
        backward_->note_ready(index);
        backward_->collect_noted(index);
      } else {
        backward_->collect(index, incoming, watched);
      }
    } catch (const Error& error) {
      give_up({error.what(), false});
      throw;
    }
    backward = backward_;
  }
  if (backward) backward->proceed(mutex_);
}

void Reducer::begin_backward() {
  // The first iteration of a static graph says nothing about the order in which gradients are ready.
  plan_used_ = !observes();
  averaging_.ready_order.clear();
  averaging_.used = 0;
  averaging_.timeline.begin_backward(averaging_.statistics.backwards, parameters_.size());
  averaging_.statistics =
      Statistics{.backwards = averaging_.statistics.backwards + 1, .buckets = plan_->buckets().size()};
  if (observes()) static_graph_->begin_observation();
  if (flat_) flat_->begin();
  Backward& backward = coming_backward();
  if (dropped_last_) backward.tell_dropped_last();
  phase_ = Phase::Syncing;
  backward.begin(plan_, *route_, finds_unused(), finds_unused() || observes());
}

// Those that are known not to come.
void Reducer::collect_missing() {
  const bool observed = static_graph_ && static_graph_->observed();
  if (observed) static_graph_->begin_backward();
  if (!observed && !finds_unused()) return;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!is_planned(i)) continue;
    if (observed ? !static_graph_->is_used(i) : !backward_->reachable(i)) backward_->collect_unused(i);
  }
}

bool Reducer::is_last_fire(size_t index, const at::Tensor& incoming, bool watched) {
  Gradient& gradient = parameters_.gradients()[index];
  if (!static_graph_->observed()) {
    static_graph_->observe(index);
    if (parameters_.tensor(index).grad().defined()) usage_.note(index);
    gradient.note(incoming, watched);
    return false;
  }
  switch (static_graph_->fire(index)) {
    case StaticGraph::Fire::Last: gradient.note(incoming, watched); return true;
    case StaticGraph::Fire::NotYet: gradient.note(incoming, watched); return false;
    case StaticGraph::Fire::Unexpected: break;
  }
  fail(graph_changed_text(index));
}

// The order in which they came is not the one in which later backwards will bring them, so it is not noted.
void Reducer::collect_observed() {
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!is_planned(i)) continue;
    if (static_graph_->is_used(i)) {
      backward_->collect_noted(i);
    } else {
      backward_->collect_unused(i);
    }
  }
}

void Reducer::shadow_backward() {
  {
    std::unique_lock lock(mutex_);
    if (unusable_) throw Error(ErrorKind::InvalidUsage, *unusable_);
    if (phase_ == Phase::Syncing || phase_ == Phase::Finalizing) {
      throw Error(ErrorKind::InvalidUsage, unfinished_text());
    }
    await_given_up(lock);
    averaging_.communicator->throw_if_failed();
    usage_.clear();
    coming_forward();
    backward_.reset();  // a forward of its own that was dropped
    coming_backward().expect(forward_);
    begin_backward();
    forward_.reset();
    backward_->collect_absent();
    phase_ = Phase::Finalizing;
  }
  finalize();
}

}  // namespace syncengine
