// Texts about how a model's last step has ended on this rank, and what is left to do about a step that some rank has
// refused (docs/errors.md). The Lifecycle decides what follows from that.
//
// Ownership: the model's; operations in flight hold the memory that they work on. Thread-safety: the reducer's lock,
// but await_end() releases it while it waits. Failure: the communicator's error.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "base/error.h"
#include "engine/progress/work.h"
#include "reducer/buckets/averaging.h"
#include "reducer/torch/python_error.h"
#include "steps/lifecycle.h"
#include "steps/texts.h"

namespace syncengine {

class Outcome {
 public:
  Outcome(const Averaging& averaging, Lifecycle& life) : averaging_(averaging), life_(life) {}

  // The error of the last backward, or forward, that was given up; empty if there was none.
  std::string last_error;
  // The reason why .grad does not hold the averages of the last backward, even of one under no_sync; empty if it does.
  std::string not_averaged;

  // The error by which the last step was lost; empty if it was not.
  std::string why_lost() const { return life_.lost() ? last_error : ""; }

  // Notes that the step, or the coming one, is lost on this rank.
  void lose(const std::string& text) {
    last_error = text;
    not_averaged = "the last backward was given up (" + text + ")";
  }
  // Tells the peers that this rank refuses the step, and announces its end. `raised_in_forward`: .grad is as it was
  // before, and stays if no rank has lost its own. Does nothing if the communicator has failed: then no peer waits.
  void refuse(const std::string& text, bool raised_in_forward) {
    try {
      averaging_.communicator->refuse(averaging_.slots, life_.step(), said_by(averaging_.rank(), text));
      end(raised_in_forward);
    } catch (const Error&) {
    }
  }
  // Announces the end of a step that a peer has refused, or this rank.
  void end(bool raised_in_forward = false) {
    auto loses_gradients = std::make_shared<uint8_t>(!raised_in_forward);
    try {
      end_ = averaging_.communicator->end_refused(averaging_.slots, life_.step(), loses_gradients);
      loses_gradients_ = std::move(loses_gradients);
      life_.refusal_ends(/*undecided=*/raised_in_forward);
    } catch (const Error&) {
    }
  }
  // Blocks until the refused step has ended on all ranks, so that another one may begin. Returns whether gradients that
  // this rank has kept must become None, as some rank could not keep its own.
  bool await_end(std::unique_lock<std::mutex>& lock) {
    while (const std::shared_ptr<Work> end = end_) {
      lock.unlock();
      averaging_.communicator->wait(end, raise_pending_signal);
      lock.lock();
      if (end_ != end) continue;  // another thread has waited, too; a later step may have ended
      end_.reset();
      const bool undecided = life_.is_undecided();
      life_.refusal_ended();
      return undecided && *loses_gradients_ != 0;
    }
    return false;
  }

 private:
  const Averaging& averaging_;
  Lifecycle& life_;
  std::shared_ptr<Work> end_;                 // of a refused step, until it is awaited
  std::shared_ptr<uint8_t> loses_gradients_;  // whether this rank does; when the work has ended, whether any does
};

}  // namespace syncengine
