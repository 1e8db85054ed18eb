// The Reducer's forwards, the end of a backward, and errors. Events of hooks in between are in reducer_events.cpp,
// settings in reducer_settings.cpp.
#include "reducer/reducer.h"

#include <pybind11/pybind11.h>

#include <algorithm>

#include "base/error.h"
#include "base/trace.h"
#include "reducer/backward/backward.h"
#include "steps/texts.h"

namespace syncengine {

namespace {

// Waits until a refused step has ended on all ranks. Makes .grad None if some rank could not keep its own.
void await_end(Model& model, std::unique_lock<std::mutex>& lock) {
  if (!model.outcome.await_end(lock)) return;
  const pybind11::gil_scoped_acquire gil;
  model.let_go_of_gradients(/*keeps=*/false);
}

void say_nonfinite(const std::string& text, Model& model) {
  trace::record_text(trace::Kind::Note, "nonfinite: " + text);
  if (model.options.nonfinite == "raise") throw Error(ErrorKind::NotFinite, text);
  std::string warning = model.record.nonfinite_warnings.next(model.record.statistics.backwards, text);
  if (warning.empty()) return;
  const auto& gradients = model.parameters.gradients();
  auto is_finite = [](const Gradient& each) { return each.parameter().isfinite().any().item<bool>(); };
  if (std::none_of(gradients.begin(), gradients.end(), is_finite))
    warning += ". No weight of " + model.parameters.names()->model + " is finite any more: go back to a checkpoint";
  warn(warning);
}

}  // namespace

Reducer::~Reducer() {
  std::lock_guard lock(mutex_);
  try {
    if (life().phase() == Phase::Syncing) {
      // Python may collect the reducer late: a .grad that is another step's or another wrapper's by now is left alone.
      {
        const pybind11::gil_scoped_acquire gil;
        for (Gradient& gradient : model_->parameters.gradients()) gradient.abandon();
      }
      give_up(names().model + " was destroyed before its backward had brought all gradients", Where::Backward,
              /*keeps=*/true);
    }
  } catch (...) {
    // The backward could not be given up, so the peers wait for its gradients until their deadline.
  }
  model_->parameters.unhook(*this);
}

bool Reducer::begin_forward(bool synchronize) {
  std::unique_lock lock(mutex_);
  if (recomputing()) return false;
  tasks_.wait_for_all(lock);
  if (synchronize) check_not_averaging();
  switch (life().begin_forward(synchronize, Facts{*this})) {
    case Lifecycle::Begin::Unfinished: {
      const std::string text = unfinished();
      give_up(text);
      throw Error(ErrorKind::InvalidUsage, text);
    }
    case Lifecycle::Begin::Unwatched: return false;
    case Lifecycle::Begin::Local: break;
    case Lifecycle::Begin::Arm: await_end(*model_, lock); break;
  }
  if (synchronize) check_not_averaging();  // once more, since await_end() releases the lock
  if (life().hooks_removed()) {
    give_up(removed_text(names()), Where::Forward, /*keeps=*/true);
    throw Error(ErrorKind::InvalidUsage, removed_text(names()));
  }
  model_->averaging.communicator->throw_if_failed();
  model_->forward.reset();
  life().forward_began(synchronize);
  if (synchronize)
    model_->record.begin_forward();
  else
    PhaseClock::of_process().enter(PhaseClock::Forward);
  // An AccumulateGrad node runs on the stream that was current when it was made. A CUDA graph can't be captured on one
  // stream with a node of the default stream. So if the stream changes, nodes that nobody else holds are made anew.
  if (model_->flat && model_->flat->current_changed()) model_->parameters.let_go_of_nodes();
  const bool changed = model_->parameters.follow(shared_from_this());
  if (!synchronize) model_->parameters.begin_accumulation();
  return model_->wants_plan(changed);
}

bool Reducer::follow_parameters() {
  std::lock_guard lock(mutex_);
  if (recomputing() || life().hooks_removed()) return false;
  const bool changed = model_->parameters.follow(shared_from_this());
  return changed && model_->wants_plan(changed);
}

std::vector<at::Tensor> Reducer::prepare_for_backward(const std::vector<at::Tensor>& outputs, const NodeNumber& began) {
  std::lock_guard lock(mutex_);
  if (recomputing()) return {};
  check_not_averaging();
  Forward& forward = model_->coming_forward();
  std::vector<at::Tensor> other_leaves;
  // Replaced parameters would train without ever being synchronized, so replacements are looked for.
  if (model_->usage.finds_unused() || model_->usage.observes() || life().brought_nothing()) {
    forward.reachable.assign(model_->parameters.size(), false);
    other_leaves = reach(outputs, model_->parameters.accumulators(), forward.reachable);
    bool is_any_unused = false;
    for (size_t i = 0; i < model_->parameters.size(); ++i) {
      is_any_unused |= model_->plan.covers(i) && !forward.reachable[i];
    }
    if (!is_any_unused) other_leaves.clear();
  }
  for (const auto& output : outputs) {
    if (const auto* node = hook_output(weak_from_this(), output, model_->forward, began))
      forward.outputs.push_back(node);
  }
  tasks_.forward_ended(began);
  expect_backward();
  return other_leaves;
}

void Reducer::check_not_averaging() const {
  if (life().phase() != Phase::Finalizing) return;
  throw Error(ErrorKind::InvalidUsage, names().model +
                                           ": a backward() still waits for averages, on another thread or around this "
                                           "hook: run this forward when it has returned");
}

void Reducer::expect_backward() {
  Forward& forward = model_->coming_forward();
  const bool outputs_hooked = !forward.outputs.empty();
  forward.plan = model_->plan.shared();
  model_->coming_backward().forwards.expect(std::exchange(model_->forward, nullptr));
  life().forward_ended(outputs_hooked);
}

void Reducer::refuse_forward(const std::string& text, bool voted) {
  std::lock_guard lock(mutex_);
  switch (life().forward_raised(Facts{*this})) {
    case Lifecycle::ForwardError::Untold: return;
    case Lifecycle::ForwardError::Expected: return expect_backward();
    case Lifecycle::ForwardError::GivesUp: return give_up(text, Where::Forward, /*keeps=*/true, voted);
  }
}

void Reducer::vote_on_forward() {
  std::shared_ptr<Work> vote;
  {
    std::unique_lock lock(mutex_);
    await_end(*model_, lock);
    if (!model_->can_refuse()) return;
    life().step_begins();
    vote = model_->vote();
  }
  try {
    model_->averaging.communicator->wait(vote, raise_pending_signal);
  } catch (const StepRefused& error) {
    std::lock_guard lock(mutex_);
    ++model_->record.statistics.backwards;  // as on the rank that has refused it
    model_->outcome.end();
    lose(error.what(), /*keeps=*/false);
    throw;
  }
}

void Reducer::decide() {
  std::unique_lock lock(mutex_);
  if (life().is_undecided() && !model_->averaging.communicator->is_closed()) await_end(*model_, lock);
}

void Reducer::shadow_backward() {
  {
    std::unique_lock lock(mutex_);
    if (life().is_unfinished()) throw Error(ErrorKind::InvalidUsage, unfinished());
    await_end(*model_, lock);
    model_->averaging.communicator->throw_if_failed();
    model_->usage.clear();
    model_->coming_forward();
    model_->backward.reset();  // this rank's own forward was dropped
    model_->coming_backward().forwards.expect(model_->forward);
    model_->record.no_batch();
    try {
      begin_backward();
      model_->forward.reset();
      model_->backward->collect_absent();
    } catch (...) {
      give_up(text_for_peers());
      throw;
    }
    model_->record.begin_wait();
    life().shadow_waits();
  }
  try {
    finalize();
  } catch (const Error& error) {
    // A refusal by another rank, or its NaN, costs a rank without gradients nothing.
    if (!dynamic_cast<const StepRefused*>(&error) && error.kind() != ErrorKind::NotFinite) throw;
  }
}

void Reducer::check_finalized() {
  std::lock_guard lock(mutex_);
  if (life().phase() == Phase::Syncing) throw Error(ErrorKind::InvalidUsage, unfinished());
}

void Reducer::drop_step() {
  std::lock_guard lock(mutex_);
  model_->end_step();
  if (life().phase() != Phase::Armed) return;  // no backward is expected
  drop_backward();
  life().backward_ended();
}

void Reducer::remove_hooks() {
  std::lock_guard lock(mutex_);
  if (life().phase() == Phase::Syncing) give_up(removed_text(names()));
  life().remove_hooks();
  model_->parameters.unhook(*this);
}

void Reducer::begin_backward() {
  life().backward_begins();
  ++model_->backwards;
  model_->coming_backward().begin();
}

void Reducer::finalize() {
  const auto backward = model_->backward;
  std::vector<size_t> written;
  std::string nonfinite;
  try {
    if (!backward->collected_all()) {
      std::lock_guard lock(mutex_);
      backward->collect_observed();
    }
    backward->proceed(mutex_);
    nonfinite = backward->finish(mutex_);
    std::lock_guard lock(mutex_);
    const int64_t delivers_from = trace::is_on() ? trace::now() : 0;
    backward->deliver(written);
    if (delivers_from != 0) {
      trace::record({.kind = trace::Kind::Delivered,
                     .begin = delivers_from,
                     .end = trace::now(),
                     .epoch = model_->record.statistics.backwards,
                     .text = trace::text(names().model)});
    }
    model_->record.end_backward(names().model);
    model_->outcome.not_averaged.clear();
    drop_backward();
    life().delivered(model_->record.statistics.backwards);
  } catch (const StepRefused& error) {
    std::lock_guard lock(mutex_);
    model_->outcome.end();
    lose(error.what(), /*keeps=*/false);
    throw;
  } catch (...) {
    // Operations may still be under way, so the step is given up. The error is the communicator's, or a hook's, or is
    // about a gradient that can't be reduced or can't take its average.
    std::lock_guard lock(mutex_);
    give_up(text_for_peers());
    throw;
  }
  // Averages are in .grad, and `nonfinite` is the same on all ranks: no peer is told. A hook may raise on one alone.
  if (!nonfinite.empty()) say_nonfinite(nonfinite, *model_);
  try {
    if (!written.empty()) model_->parameters.run_user_hooks(written);
  } catch (...) {
    std::lock_guard lock(mutex_);
    give_up(dropped_text(names()), Where::BehindAverages, /*keeps=*/false);
    throw;
  }
}

std::string Reducer::unfinished() const {
  std::vector<Awaited> awaited;
  for (size_t i : model_->plan->covered()) awaited.push_back({i, model_->parameters.gradients()[i].collected()});
  return unfinished_text(names(), awaited, model_->averaging.rank(), model_->usage.static_graph() != nullptr);
}

void Reducer::give_up(const std::string& text, Where where, bool keeps, bool voted) {
  const Lifecycle::Loss loss = life().raised(where, Facts{*this});
  if (loss == Lifecycle::Loss::Nothing) return;
  if (loss == Lifecycle::Loss::Aborts) return model_->averaging.tell_peers(text);
  try {
    if (loss == Lifecycle::Loss::BeginsStep) {
      if (model_->forward) model_->coming_backward().forwards.expect(std::exchange(model_->forward, nullptr));
      begin_backward();
    }
  } catch (const std::exception&) {
    // The step can't begin (forwards contradict each other, or memory is short), but it is lost in any case.
  }
  switch (life().tell(Facts{*this})) {
    case Lifecycle::Tell::Nobody: break;
    case Lifecycle::Tell::Refuse:
      try {
        model_->outcome.refuse(text, /*raised_in_forward=*/where == Where::Forward);
        if (model_->backward && !voted) model_->backward->stand_in();
      } catch (...) {
        model_->averaging.tell_peers(text);
      }
      break;
    case Lifecycle::Tell::Abort: model_->averaging.tell_peers(text); break;
  }
  lose(text, keeps);
}

void Reducer::lose(const std::string& text, bool keeps) {
  // Takes the GIL, which protects .grad: autograd's thread for a device may come here when backward() has already
  // raised, and its caller uses .grad.
  const pybind11::gil_scoped_acquire gil;
  if (model_->backward) {
    model_->backward->forwards.give_up(text);
    model_->backward->drop();
  }
  model_->let_go_of_gradients(keeps);
  model_->plan.use(/*shows_order=*/false);  // gradients may be missing, here or on other ranks
  model_->outcome.lose(text);
  model_->record.interrupt();
  drop_backward();
  life().step_lost();
}

}  // namespace syncengine
