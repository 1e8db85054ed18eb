// The Reducer at backward's end: waits for the buckets, and puts the averages into .grad.
//
// Callbacks run at the end of the graph task they were queued in. Reentrant checkpointing nests tasks, and an inner one may
// end before later hooks run or bring the last gradient itself. So each task that we see gets a callback, and the first to
// find all buckets announced finalizes. That may be an inner task: nothing written here is read by an outer one.
#include <torch/csrc/autograd/graph_task.h>

#include <utility>

#include "base/error.h"
#include "reducer/python_error.h"
#include "reducer/reducer.h"
#include "reducer/sparse.h"

namespace syncengine {

void Reducer::watch_this_backward() {
  int task = torch::autograd::get_current_graph_task_id();
  if (std::exchange(watched_task_, task) == task) return;
  queue_backward_end(shared_from_this());
  ++tasks_watched_;
}

void Reducer::on_backward_end() {
  {
    std::lock_guard lock(mutex_);
    --tasks_watched_;
    task_ended_.notify_all();
    brought_nothing_ = phase_ == Phase::Armed;
    // An inner task has finalized: this one may go on another stream.
    if (flat_ && phase_ == Phase::Consumed) flat_->join();
    if (phase_ != Phase::Syncing) return;
    // The outermost task, which on_output watches, ends last: only then all hooks have fired.
    bool observed_now = observes() && tasks_watched_ == 0;
    if (buckets_missing_ > 0 && !observed_now) return;
    phase_ = Phase::Finalizing;
  }
  finalize();
  if (!any_user_hooks_) return;
  for (const auto& bucket : buckets_) {
    for (size_t i : bucket.layout->parameters) run_postponed(gradients_[i].parameter());
  }
}

void Reducer::finalize() {
  try {
    if (buckets_missing_ > 0) collect_observed();
    if (comm_hook_) run_comm_hooks();
    wait_for_buckets();
  } catch (...) {
    std::lock_guard lock(mutex_);
    settle_after_failure();
    throw;
  }
  {
    std::lock_guard lock(mutex_);
    for (auto& bucket : buckets_) deliver(bucket);
    used_here_.assign(used_here_.size(), false);
    timeline_.end();
    divisor_ = communicator_->size();
    weight_ = 1.0;
    shadowed_ = false;
    phase_ = Phase::Consumed;
  }
}

void Reducer::wait_for_buckets() {
  if (options_.skip_all_reduce_unused_params) check_skipped();
  if (comm_hook_) {
    wait_for_hooks();
  } else if (flat_) {
    flat_->finish(buckets_, gradients_);
  } else {
    for (const auto& bucket : buckets_) {
      if (bucket.work) communicator_->wait(bucket.work, raise_pending_signal);
    }
  }
  if (usage_work_) communicator_->wait(usage_work_, raise_pending_signal);
  if (!comm_hook_ && !sparse_.empty()) {
    std::vector<at::Tensor> gradients;
    for (size_t i : sparse_) {
      if (flat_) flat_->take_over(buckets_[bucket_of_[i]], gradients_);
      gradients.push_back(gradients_[i].memory());
    }
    size_t bytes = average_sparse(gradients, *communicator_, divisor_, names_->model);
    std::lock_guard lock(mutex_);
    statistics_.reduced_bytes += bytes;
  }
  for (const TorchFuture& future : std::exchange(futures_, {})) {
    wait_for_future(future, *communicator_, [this] { return "a buffer hook's future of " + names_->model; });
  }
}

void Reducer::wait_for_hooks() {
  try {
    for (const auto& bucket : buckets_) {
      if (!bucket.memory) continue;
      if (flat_) flat_->take_over(bucket, gradients_);
      const at::Tensor result = comm_hook_->finish(*bucket.layout, bucket.memory->gradients, *communicator_);
      if (flat_) flat_->keep(result);
    }
  } catch (...) {
    tell_peers("the communication hook's future failed: " + current_error_text());
    throw;
  }
}

// Ranks that skip what others reduce would wait for each other forever.
void Reducer::check_skipped() const {
  if (usage_work_) communicator_->wait(usage_work_, raise_pending_signal);
  for (const auto& bucket : buckets_) {
    if (bucket.state != Bucket::State::Skipped) continue;
    for (size_t i : bucket.layout->parameters) {
      if ((*used_anywhere_)[i] == 0) continue;
      std::string text =
          "parameter " + name(i) +
          " is used on some ranks and not on others, which skip_all_reduce_unused_params=True does not allow";
      tell_peers(text);
      throw Error(ErrorKind::Mismatch, text);
    }
  }
}

void Reducer::deliver(Bucket& bucket) {
  const auto& parameters = bucket.layout->parameters;
  if (bucket.memory) {
    auto& [gradients, small, used] = *bucket.memory;
    if (bucket.work) small.copy_out();
    for (size_t k = 0; k < 64 * used.size() && k < parameters.size(); ++k) {
      (*used_anywhere_)[parameters[k]] = used[k / 64] >> k % 64 & 1;
    }
    if (compression_ && bucket.work) {
      at::NoGradGuard no_grad;
      for (size_t k = 0; k < parameters.size(); ++k) gradients_[parameters[k]].memory().copy_(gradients[k]);
    }
    *bucket.memory = {};  // the engine may hold the operation a little longer
  }
  for (size_t i : parameters) {
    gradients_[i].deliver(!tracks_usage() || (*used_anywhere_)[i] != 0);
    if (scaling_ == Scaling::DivideViewed) gradients_[i].keep();
  }
  bucket.state = Bucket::State::Reduced;
  bucket.work.reset();
  bucket.memory.reset();
}

void Reducer::on_backward_failed() noexcept {
  try {
    std::lock_guard lock(mutex_);
    fail_backward();
  } catch (...) {
    // The error that is on its way says more.
  }
}

void Reducer::on_backward_abandoned() noexcept {
  try {
    std::lock_guard lock(mutex_);
    --tasks_watched_;
    task_ended_.notify_all();
    fail_backward();
  } catch (...) {
    // In a destructor, on the way of the error that ended this backward.
  }
}

void Reducer::fail_backward() {
  if (phase_ != Phase::Armed && phase_ != Phase::Syncing) return;
  tell_peers("backward aborted");
  settle_after_failure();
}

void Reducer::settle_after_failure() {
  // A device's thread of autograd may come here when whoever called backward() has its error and touches .grad, under the GIL.
  const pybind11::gil_scoped_acquire gil;
  for (auto& bucket : buckets_) {
    if (bucket.work && bucket.work->state() == Work::State::Done && !tracks_usage()) {
      deliver(bucket);
      continue;
    }
    for (size_t i : bucket.layout->parameters) gradients_[i].discard();
    bucket.work.reset();
    bucket.memory.reset();  // not cleared: the engine keeps what it might still touch
  }
  if (comm_hook_) comm_hook_->reset(buckets_.size());  // a hook's collectives may still write there
  phase_ = Phase::Consumed;
}

}  // namespace syncengine
