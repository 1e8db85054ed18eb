// The Reducer while backward runs: gradients are collected, and their buckets announced or handed to the communication hook.
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
  if (!pool_ || !pooled_sizes_) return;
  int task = torch::autograd::get_current_graph_task_id();
  if (std::exchange(pooled_task_, task) != task) pool_gradients_of_this_task(*pool_, pooled_sizes_);
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
  plan_used_ = !static_graph_ || static_graph_->observed();
  for (auto& bucket : buckets_) {
    bucket.state = Bucket::State::Filling;
    bucket.missing = bucket.layout->parameters.size();
  }
  buckets_missing_ = buckets_.size();
  next_hooked_ = 0;
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
  static_graph_->end_of_observation();
  for (size_t i = 0; i < planned_.size(); ++i) {
    if (!planned_[i]) continue;
    if (static_graph_->is_used(i)) {
      gradients_[i].collect_noted(name(i), statistics_);
      count_collected(i);
    } else {
      collect_unused(i);
    }
  }
  announce_usage();
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
  if (--bucket.missing > 0) return;
  bucket.state = Bucket::State::Ready;
  --buckets_missing_;
  if (weight_ != 1.0) weigh(bucket);
  if (skips(bucket)) {
    bucket.state = Bucket::State::Skipped;
  } else if (!comm_hook_ && !bucket.layout->sparse) {
    announce(bucket);
  }
  if (buckets_missing_ == 0 && finds_unused()) announce_usage();
}

bool Reducer::skips(const Bucket& bucket) const {
  if (!options_.skip_all_reduce_unused_params) return false;
  for (size_t i : bucket.layout->parameters) {
    if (!gradients_[i].stands_in()) return false;
  }
  return true;
}

void Reducer::announce(Bucket& bucket) {
  const BucketLayout& layout = *bucket.layout;
  Operation operation;
  operation.dtype = compression_ ? compression_->dtype() : layout.dtype;
  operation.op = ReduceOp::Avg;
  operation.numerics = communicator_->numerics();
  // DDP scales each contribution as it copies it into the bucket; rank_order scales the sum, and so rounds once.
  double& scale = compression_ || operation.numerics == Numerics::Ring ? operation.prescale : operation.postscale;
  bucket.memory = std::make_shared<std::vector<at::Tensor>>();
  bucket.memory->reserve(layout.parameters.size());
  if (compression_) {
    for (size_t i : layout.parameters) {
      bucket.memory->push_back(compression_->compress(gradients_[i].memory(), statistics_));
    }
  } else {
    for (size_t i : layout.parameters) bucket.memory->push_back(gradients_[i].memory());
  }
  if (scaling_ == Scaling::Multiply || is_exact(divisor_)) {
    scale = 1.0 / divisor_;
  } else {
    scale_one_by_one(bucket);
  }
  if (pool_ && operation.prescale == 1.0) bucket.small = SmallGradients::gather(*pool_, *bucket.memory, statistics_);
  for (size_t i = 0; i < bucket.memory->size(); ++i) {
    operation.output.add(bucket.small.place(*bucket.memory, i), (*bucket.memory)[i].nbytes());
  }
  statistics_.reduced_bytes += operation.output.bytes();
  operation.input = operation.output;
  operation.layout_hash = layout.hash;
  operation.describe = [layout = bucket.layout] { return layout->describe(); };
  operation.keepalive = bucket.memory;
  if (bucket.small.memory())
    operation.keepalive =
        std::make_shared<std::pair<std::shared_ptr<void>, std::shared_ptr<void>>>(bucket.memory, bucket.small.memory());
  timeline_.bucket();
  bucket.work = communicator_->announce(first_slot_ + layout.index, std::move(operation));
  bucket.state = Bucket::State::InFlight;
}

void Reducer::scale_one_by_one(const Bucket& bucket) const {
  at::NoGradGuard no_grad;
  for (size_t k = 0; k < bucket.memory->size(); ++k) {
    bool divide = scaling_ == Scaling::Divide || gradients_[bucket.layout->parameters[k]].is_kept();
    scale((*bucket.memory)[k], divide, divisor_);
  }
}

void Reducer::announce_usage() {
  for (size_t i = 0; i < used_here_.size(); ++i) (*used_anywhere_)[i] = used_here_[i];
  Operation operation;
  operation.dtype = DType::UInt8;
  operation.op = ReduceOp::Max;
  operation.numerics = communicator_->numerics();
  operation.output.add(used_anywhere_->data(), used_anywhere_->size());
  operation.input = operation.output;
  operation.describe = [names = names_] { return "used parameters of " + names->model; };
  operation.keepalive = used_anywhere_;
  usage_work_ = communicator_->announce(first_slot_ + gradients_.size(), std::move(operation));
}

// In the order of buckets, which is the same on all ranks, since what hooks send is matched by its order; and without the
// lock, since a hook is anybody's code.
void Reducer::run_comm_hooks() {
  std::unique_lock lock(mutex_);
  if (phase_ != Phase::Syncing && phase_ != Phase::Finalizing) return;
  while (!hook_runs_ && next_hooked_ < buckets_.size() && buckets_[next_hooked_].state >= Bucket::State::Ready) {
    Bucket& bucket = buckets_[next_hooked_++];
    if (bucket.state == Bucket::State::Skipped) continue;
    bucket.state = Bucket::State::InFlight;
    bucket.memory = std::make_shared<std::vector<at::Tensor>>();
    std::vector<at::Tensor> parameters;
    for (size_t i : bucket.layout->parameters) {
      bucket.memory->push_back(gradients_[i].memory());
      parameters.push_back(gradients_[i].parameter());
    }
    statistics_.count_copy(CopyReason::CommHook, CommHook::bytes(*bucket.memory));
    timeline_.bucket();
    auto layout = bucket.layout;
    auto memory = bucket.memory;
    hook_runs_ = true;
    lock.unlock();
    try {
      comm_hook_->start(*layout, std::move(parameters), *memory);
    } catch (...) {
      tell_peers("the communication hook raised " + current_error_text());
      lock.lock();
      hook_runs_ = false;
      throw;
    }
    lock.lock();
    hook_runs_ = false;
  }
}

}  // namespace syncengine
