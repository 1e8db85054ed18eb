// The Reducer at backward's end: waits for the buckets, and puts the averages into .grad. Or gives up.
//
// Callbacks run at the end of the graph task they were queued in. Reentrant checkpointing nests tasks, and an inner one
// may end before later hooks run or bring the last gradient itself. So each task that we see gets a callback, and the
// first to find all buckets announced finalizes. That may be an inner task: nothing written here is read by an outer
// one.
#include <pybind11/pybind11.h>

#include <utility>

#include "base/error.h"
#include "reducer/peers.h"
#include "reducer/reducer.h"

namespace syncengine {

void Reducer::on_backward_end() {
  {
    std::lock_guard lock(mutex_);
    tasks_.ended();
    brought_nothing_ = phase_ == Phase::Armed;
    if (brought_nothing_) claimed_ = false;
    // An inner task has finalized: this one may go on another stream.
    if (flat_ && phase_ == Phase::Consumed) flat_->join();
    if (phase_ != Phase::Syncing) return;
    // The outermost task, which on_output watches, ends last: only then all hooks have fired.
    const bool observed_now = observes() && !tasks_.any();
    if (!backward_->collected_all() && !observed_now) return;
    phase_ = Phase::Finalizing;
  }
  finalize();
}

void Reducer::finalize() {
  const int64_t waits_from = StepTimes::now();
  const auto backward = backward_;
  std::vector<size_t> written;
  try {
    if (!backward->collected_all()) collect_observed();
    backward->proceed(mutex_);
    backward->finish();
    check_masks(*backward);
  } catch (const Error& error) {
    fail_finalizing(error.what());
    throw;
  } catch (...) {
    fail_finalizing("backward aborted");
    throw;
  }
  {
    std::lock_guard lock(mutex_);
    if (observes() && !backward->has_shadows()) static_graph_->end_of_observation();
    written = backward->deliver(tracks_usage(), parameters_.any_user_hooks());
    usage_.clear();
    averaging_.timeline.end();
    averaging_.step_times->end(waits_from, averaging_.statistics.reduced_bytes);
    const auto used = std::exchange(last_used_, averaging_.used);
    graph_is_static_ &= !used || used == last_used_;
    dropped_last_ = false;
    ended_well_ = averaging_.statistics.backwards;
    not_averaged_.clear();
    end_backward();
  }
  if (!written.empty()) run_hooks_of_users(written);
}

void Reducer::run_hooks_of_users(const std::vector<size_t>& written) {
  delivers_ = true;
  try {
    for (size_t i : written) run_user_hooks(parameters_.tensor(i));
    delivers_ = false;
  } catch (...) {
    delivers_ = false;
    std::lock_guard lock(mutex_);
    note_dropped();
    throw;
  }
}

// This rank's code has failed when the averages were complete. The next backward tells, where its route can.
void Reducer::note_dropped() {
  dropped_last_ = true;
  if (!route_->outlives_errors()) {
    tell_peers(*averaging_.communicator, dropped_text());
  } else if (!unread_) {
    unread_ = Reasons(averaging_, parameters_.model(), Reason{dropped_text(), false});
  }
}

void Reducer::end_backward() {
  forward_.reset();
  claimed_ = false;
  backward_.reset();
  phase_ = Phase::Consumed;
}

// Throws if some rank has abandoned this backward, or dropped the averages of the last one.
void Reducer::check_masks(Backward& backward) {
  Communicator& communicator = *averaging_.communicator;
  auto unread = std::exchange(unread_, std::nullopt);
  if (backward.abandoned_by() != 0) {
    const Reason reason = (unread ? *unread : Reasons(averaging_, parameters_.model(), std::nullopt)).wait();
    for (const Bucket& bucket : backward.buckets()) {
      if (bucket.work) communicator.wait(bucket.work);
    }
    if (reason.for_good) {
      std::lock_guard lock(mutex_);
      unusable_ = reason.text;
    } else {
      communicator.abort(ErrorKind::Aborted, reason.text);
    }
    throw Error(ErrorKind::Aborted, reason.text);
  }
  if (unread && backward.dropped_by() == everybody()) communicator.wait(unread->work());
  if (backward.dropped_by() == 0 || backward.dropped_by() == everybody()) return;
  std::string ranks;
  for (int member = 0; member < communicator.size(); ++member) {
    if (!(backward.dropped_by() >> member & 1)) continue;
    ranks += (ranks.empty() ? "rank " : ", ") + std::to_string(communicator.global_ranks()[member]);
  }
  const std::string text = ranks + ": " + dropped_text();
  communicator.abort(ErrorKind::Aborted, text);
  throw Error(ErrorKind::Aborted, text);
}

// With what is on its way: an error of the communicator, of somebody's hook, or of a gradient that can't be reduced.
void Reducer::fail_finalizing(const std::string& text) {
  std::lock_guard lock(mutex_);
  last_error_ = text;
  averaging_.step_times->interrupt();
  bool connected = true;
  try {
    averaging_.communicator->throw_if_failed();
  } catch (const Error&) {
    connected = false;
  }
  if (connected && !unusable_ && !backward_->collected_all()) return give_up({text, false});
  if (connected && !unusable_) tell_peers(*averaging_.communicator, text);
  const pybind11::gil_scoped_acquire gil;
  backward_->drop(/*keeps_gradients=*/false);
  end_backward();
}

// For errors on this rank. Under the lock.
void Reducer::give_up(const Reason& reason, bool keeps_gradients) {
  last_error_ = reason.text;
  averaging_.step_times->interrupt();
  not_averaged_ = "the last backward was abandoned (" + reason.text + ")";
  if (reason.for_good) unusable_ = reason.text;
  // A device's thread of autograd may come here when whoever called backward() has its error and touches .grad, under
  // the GIL.
  const pybind11::gil_scoped_acquire gil;
  bool told = false;
  try {
    if (plan_ && !coming_backward().has_begun()) begin_backward();
    if (plan_ && backward_->can_be_abandoned()) {
      Abandoned left = backward_->abandon(keeps_gradients);
      auto unread = std::exchange(unread_, std::nullopt);
      Reasons reasons = unread ? *unread : Reasons(averaging_, parameters_.model(), reason);
      given_up_.emplace(GivenUp{std::move(left), reason, std::move(reasons), unread.has_value()});
      auto works = given_up_->left.works;
      works.push_back(given_up_->reasons.work());
      averaging_.communicator->set_last_words(said_here(*averaging_.communicator, reason.text), std::move(works));
      told = true;
    }
  } catch (const Error&) {
    // The communicator has failed: nobody waits any more.
  }
  if (!told) {
    given_up_.reset();
    tell_peers(*averaging_.communicator, reason.text);
    if (backward_) backward_->drop(keeps_gradients);
  }
  if (!keeps_gradients) usage_.clear();
  end_backward();
}

void Reducer::fail(const std::string& text) {
  if (phase_ == Phase::Armed || phase_ == Phase::Syncing) {
    give_up({text, false});
  } else {
    tell_peers(*averaging_.communicator, text);
  }
  throw Error(ErrorKind::InvalidUsage, text);
}

void Reducer::on_backward_failed(const std::string& text) noexcept {
  try {
    std::lock_guard lock(mutex_);
    if (phase_ == Phase::Armed || phase_ == Phase::Syncing) give_up({text, false});
  } catch (...) {
    // The error that is on its way says more.
  }
}

void Reducer::on_backward_abandoned(uint64_t backward) noexcept {
  try {
    std::lock_guard lock(mutex_);
    tasks_.ended();
    if (phase_ == Phase::Armed || phase_ == Phase::Syncing) give_up({"backward aborted", false});
    if (backward == ended_well_) note_dropped();
  } catch (...) {
    // In a destructor, on the way of the error that ended this backward.
  }
}

}  // namespace syncengine
