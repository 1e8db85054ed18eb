// The Reducer's handling of events of autograd's hooks while backward runs.
//
// Callbacks run at the end of the graph task in which they were queued. Reentrant checkpointing nests tasks, and an
// inner task may end before later hooks run, or may itself bring the last gradient. So each task that brings gradients
// gets a callback, and the first callback that finds all gradients collected finalizes. Its task may be an inner one:
// no outer task reads the .grad that is written then.
#include "base/error.h"
#include "reducer/backward/backward.h"
#include "reducer/reducer.h"
#include "steps/texts.h"

namespace syncengine {

bool Reducer::Facts::runs_forwards_graph() const {
  if (reducer.tasks_.is_new()) tell_of_outer_task(reducer.weak_from_this(), /*is_ours=*/false);
  return reducer.tasks_.runs_forwards_nodes();
}

bool Reducer::Facts::collected_all() const { return model().backward->collected_all(); }

bool Reducer::Facts::has_failed() const {
  try {
    model().averaging.communicator->throw_if_failed();
    return false;
  } catch (const Error&) {
    return true;
  }
}

void Reducer::on_output(Forward* forward) {
  std::shared_ptr<Backward> backward;
  {
    std::lock_guard lock(mutex_);
    switch (life().output(/*own=*/forward == nullptr, Facts{*this})) {
      case Lifecycle::Output::Ignore: return;
      case Lifecycle::Output::Own:
        model_->outcome.not_averaged = "the last backward was this rank's own (no_sync)";
        ++model_->backwards;
        return model_->pool_gradients();
      case Lifecycle::Output::Spent: refuse_backward(forward->given_up);
      case Lifecycle::Output::Claims: break;
    }
    forward->reached = true;
    model_->pool_gradients();
    // From here on the peers expect this rank: an error anywhere in this backward must reach them.
    watch_this_backward();
    // The backward begins here if parameters may be unused: if it uses none of them, no other hook will run.
    if (model_->usage.tracks()) {
      begin_backward();
      model_->backward->collect_missing();
      backward = model_->backward;
    }
  }
  if (backward) backward->proceed(mutex_);
}

void Reducer::refuse_backward(const std::string& lost) {
  const Error error(ErrorKind::InvalidUsage, consumed_text(names(), lost));
  // No rank may leave a step of micro-batches by itself, so peers are told. If the forward was given up, they know.
  if (model_->step && lost.empty()) model_->averaging.tell_peers(error.what(), error.kind());
  throw error;
}

void Reducer::watch_this_backward() {
  if (!tasks_.watch()) return;
  queue_backward_end(shared_from_this(), model_->record.statistics.backwards + (life().phase() == Phase::Armed),
                     life().forwards());
  // Hooks on outputs watch the outermost task. Without them it may be unknown: the task around is looked at later.
  if (!life().outputs_hooked()) tell_of_outer_task(weak_from_this(), /*is_ours=*/true);
}

bool Reducer::takes(size_t index) {
  const Parameters& parameters = model_->parameters;
  const at::Tensor& parameter = parameters.tensor(index);
  if (!parameter.requires_grad() && !model_->plan.covers(index)) return false;  // frozen: its node was run for nothing
  if (model_->usage.finds_unused() && parameter.grad().defined()) model_->usage.note(index);
  switch (life().gradient(index, Facts{*this})) {
    case Attribution::Foreign: return false;
    case Attribution::Local:
      PhaseClock::of_process().local_gradient();
      model_->parameters.accumulated(index);
      return false;
    case Attribution::First:
      // If all parameters were frozen (requires_grad=False) in the last forward, this gradient comes from an older
      // graph, whose backward uses the bucket plan from before they were frozen.
      if (const auto& before = model_->plan.before_frozen()) model_->install(before);
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
  if (life().phase() == Phase::Local && !model_->options.find_unused_parameters) {
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
  backward->proceed(mutex_);
}

void Reducer::on_backward_end() {
  {
    std::lock_guard lock(mutex_);
    tasks_.ended();
    switch (life().task_ended(Facts{*this})) {
      case Lifecycle::End::Wait: return;
      case Lifecycle::End::Join:
        if (model_->flat) model_->flat->join();  // this task may go on another stream
        return;
      case Lifecycle::End::Lost: throw Error(ErrorKind::Aborted, model_->outcome.last_error);
      case Lifecycle::End::Finalize: model_->record.begin_wait();
    }
  }
  finalize();
}

void Reducer::on_backward_failed(const std::string& text) noexcept {
  try {
    std::lock_guard lock(mutex_);
    if (life().awaits()) give_up(text);
  } catch (...) {
    // The hook's error, which has ended this backward, is on its way to the caller and says more than this one.
  }
}

void Reducer::on_task_failed(uint64_t backward, uint64_t forwards) noexcept {
  try {
    std::lock_guard lock(mutex_);
    tasks_.ended();
    const Lifecycle::TaskLoss loss = life().task_failed(backward, forwards);
    if (loss.step) give_up("backward aborted");
    if (loss.averages) give_up(dropped_text(names()), Where::BehindAverages, loss.keeps);
  } catch (...) {
    // A destructor runs here because of the error that ended this backward, and must not throw another.
  }
}

void Reducer::on_outer_task(bool inner_is_ours) noexcept {
  try {
    std::lock_guard lock(mutex_);
    switch (life().outer_task(inner_is_ours, Facts{*this})) {
      case Lifecycle::Outer::Leave: return;
      case Lifecycle::Outer::Watch: return watch_this_backward();
      case Lifecycle::Outer::Fail: return fail_at_task_end(consumed_text(names(), model_->outcome.why_lost()));
    }
  } catch (...) {
    // A destructor runs here, since the inner task has ended, and must not throw.
  }
}

}  // namespace syncengine
