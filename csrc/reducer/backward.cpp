// The Reducer while backward runs: gradients are collected, and counted in their buckets.
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include "base/error.h"
#include "reducer/reducer.h"

namespace syncengine {

namespace {

// True in backward() without `inputs`: it accumulates into every leaf. autograd.grad() and backward(inputs=...) do not.
bool whole_graph_runs() {
  const auto* chosen = torch::autograd::get_current_graph_task_exec_info();
  return chosen == nullptr || chosen->empty();
}

}  // namespace

void Reducer::on_output() {
  {
    std::lock_guard lock(mutex_);
    if (!whole_graph_runs()) return;
    if (phase_ == Phase::Consumed) throw_consumed();
    if (phase_ != Phase::Armed) return;
    pool_gradients();
    // From here on the peers expect us: an error anywhere in this backward must reach them.
    watch_this_backward();
    // If no parameter at all is used here, no other hook will run.
    if (tracks_usage()) {
      begin_backward();
      collect_missing();
    }
  }
  if (comm_hook_) run_comm_hooks();
}

void Reducer::on_local_output() {
  std::lock_guard lock(mutex_);
  pool_gradients();
}

// From here on this backward's gradients lie where peers reach them.
void Reducer::pool_gradients() {
  if (!pool_ || !habits_) return;
  int task = torch::autograd::get_current_graph_task_id();
  if (std::exchange(pooled_task_, task) == task) return;
  bool accumulates = !buckets_.empty() && gradients_[buckets_[0].layout->parameters[0]].parameter().grad().defined();
  use_in_this_task(std::make_shared<gradient_memory::Grant>(*pool_, habits_, accumulates));
}

bool Reducer::postpones(size_t index) const {
  std::lock_guard lock(mutex_);
  return planned_[index] && (phase_ == Phase::Armed || phase_ == Phase::Syncing);
}

void Reducer::on_gradient(size_t index, const at::Tensor& incoming) {
  if (phase_.load(std::memory_order_relaxed) == Phase::Local && !options_.find_unused_parameters)
    return;  // this thread's
  {
    std::lock_guard lock(mutex_);
    if (finds_unused() && gradients_[index].parameter().grad().defined()) used_here_[index] = true;
    switch (phase_) {
      case Phase::Local: return;
      case Phase::Finalizing: throw_collected_twice(index);
      case Phase::Consumed:
        if (tasks_watched_ > 0) throw_collected_twice(index);
        if (!outputs_hooked_) throw_consumed();  // as far as one can tell
        return;                                  // a backward that is none of ours: on_output has not run
      case Phase::Armed:
        watch_this_backward();
        begin_backward();
        collect_missing();
        break;
      case Phase::Syncing: watch_this_backward();
    }
    if (static_graph_ && !is_last_fire(index, incoming)) return;
    collect(index, incoming);
  }
  if (comm_hook_) run_comm_hooks();
}

void Reducer::begin_backward() {
  phase_ = Phase::Syncing;
  // The first iteration of a static graph says nothing about the order in which gradients are ready.
  plan_used_ = !observes();
  asks_usage_ = finds_unused() || observes();
  if (observes()) static_graph_->begin_observation();
  for (auto& bucket : buckets_) {
    bucket.state = Bucket::State::Filling;
    bucket.missing = bucket.layout->parameters.size();
  }
  buckets_missing_ = buckets_.size();
  next_in_order_ = 0;
  if (flat_) flat_->begin();
  ready_order_.clear();
  timeline_.begin_backward(statistics_.backwards, gradients_.size());
  statistics_ = Statistics{.backwards = statistics_.backwards + 1, .buckets = buckets_.size()};
}

// Those that are known not to come.
void Reducer::collect_missing() {
  if (static_graph_ && static_graph_->observed()) {
    static_graph_->begin_backward();
    for (size_t i = 0; i < planned_.size(); ++i) {
      if (planned_[i] && !static_graph_->is_used(i)) collect_unused(i);
    }
  } else if (options_.find_unused_parameters && !static_graph_) {
    for (size_t i = 0; i < planned_.size(); ++i) {
      if (planned_[i] && !reachable_[i]) collect_unused(i);
    }
  }
}

bool Reducer::is_last_fire(size_t index, const at::Tensor& incoming) {
  if (!static_graph_->observed()) {
    static_graph_->observe(index);
    if (gradients_[index].parameter().grad().defined()) used_here_[index] = true;
    gradients_[index].note(incoming);
    return false;
  }
  switch (static_graph_->fire(index)) {
    case StaticGraph::Fire::Last: gradients_[index].note(incoming); return true;
    case StaticGraph::Fire::NotYet: gradients_[index].note(incoming); return false;
    case StaticGraph::Fire::Unexpected: break;
  }
  throw_graph_changed(index);
}

// The order in which they came is not the one in which later backwards will bring them, so it is not noted.
void Reducer::collect_observed() try {
  std::lock_guard lock(mutex_);
  if (!shadowed_) static_graph_->end_of_observation();
  for (size_t i = 0; i < planned_.size(); ++i) {
    if (!planned_[i]) continue;
    if (static_graph_->is_used(i)) {
      gradients_[i].collect_noted(name(i), statistics_);
      count_collected(i);
    } else {
      collect_unused(i);
    }
  }
} catch (const Error& error) {
  tell_peers(error.what());
  throw;
}

void Reducer::collect_unused(size_t index) {
  gradients_[index].collect_unused(statistics_);
  count_collected(index);
}

void Reducer::collect(size_t index, const at::Tensor& incoming) {
  Gradient& gradient = gradients_[index];
  if (gradient.collected() || !planned_[index]) throw_collected_twice(index);
  try {
    if (static_graph_) {
      gradient.collect_noted(name(index), statistics_);
    } else {
      gradient.collect(incoming, name(index), statistics_);
    }
  } catch (const Error& error) {
    tell_peers(error.what());
    throw;
  }
  ready_order_.push_back(index);
  timeline_.gradient();
  count_collected(index);
}

void Reducer::count_collected(size_t index) {
  Bucket& bucket = buckets_[bucket_of_[index]];
  if (flat_) {
    flat_->note(bucket_of_[index]);
    if (weight_ != 1.0) gradients_[index].weigh(weight_);  // on the stream that has made it
  } else if (!bucket.memory && !comm_hook_ && !bucket.layout->sparse) {
    bucket.memory = make_memory(*bucket.layout);
  }
  if (weight_ == 1.0) copy_if_small(bucket, position_of_[index]);
  if (--bucket.missing > 0) return;
  bucket.state = Bucket::State::Ready;
  --buckets_missing_;
  if (weight_ != 1.0 && !flat_) {
    weigh(bucket);
    for (size_t k = 0; k < bucket.layout->parameters.size(); ++k) copy_if_small(bucket, k);
  }
  if (skips(bucket)) {
    bucket.state = Bucket::State::Skipped;
  } else if (!comm_hook_ && !flat_ && !bucket.layout->sparse) {
    announce(bucket);
  }
  if (flat_ && !comm_hook_) start_flat_buckets();
  if (buckets_missing_ == 0 && asks_usage_ && !usage_travels()) announce_usage();
}

}  // namespace syncengine
