// From one step of a model to the next: which step it is, how the last one has ended on this rank, and what is left to
// do about one that some rank has refused (docs/errors.md).
//
// Ownership: the model's; operations in flight hold the memory that they work on. Thread-safety: the reducer's lock,
// but await_end() releases it while it waits. Failure: the communicator's error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "engine/progress/work.h"
#include "reducer/buckets/averaging.h"
#include "reducer/torch/python_error.h"
#include "steps/texts.h"

namespace syncengine {

class Outcome {
 public:
  explicit Outcome(const Averaging& averaging) : averaging_(averaging) {}

  // Of the last backward, or forward, that was given up; empty if there was none.
  std::string last_error;
  bool lost = false;  // so was the last one
  // Why .grad does not hold the averages of the last backward, of one under no_sync, too; empty if it does.
  std::string not_averaged;
  bool brought_nothing = false;  // it came from our outputs, and ended without any gradient

  // A step begins, which all ranks count alike.
  void begin() { ++step_; }
  uint64_t step() const { return step_; }
  // All its averages are there. `backward`: its number.
  void end_well(uint64_t backward) {
    ended_well_ = backward;
    lost = false;
    not_averaged.clear();
  }
  bool has_ended_well(uint64_t backward) const { return backward == ended_well_; }

  // Of the last one, if it was lost.
  std::string why_lost() const { return lost ? last_error : ""; }

  // The step, or what was to become one, is lost on this rank.
  void lose(const std::string& text) {
    last_error = text;
    lost = true;
    not_averaged = "the last backward was given up (" + text + ")";
  }
  // Tells the peers, and ends the step. `raised_in_forward`: .grad is what it was before, until all ranks have said how
  // the step has ended for them.
  void refuse(const std::string& text, bool raised_in_forward) {
    averaging_.communicator->refuse(averaging_.slots, step_, said_by(averaging_.rank(), text));
    end(raised_in_forward);
  }
  // Ends one that a peer has refused, or this rank. If the communicator has failed since, nobody waits for the end.
  void end(bool raised_in_forward = false) {
    auto loses_gradients = std::make_shared<uint8_t>(!raised_in_forward);
    try {
      auto work = averaging_.communicator->end_refused(averaging_.slots, step_, loses_gradients);
      end_.emplace(End{std::move(work), std::move(loses_gradients), raised_in_forward});
    } catch (const Error&) {
    }
  }
  // Whether the last step was refused, and may not have ended on all ranks yet.
  bool is_ending() const { return end_.has_value(); }
  // Whether that decides about this rank's gradients.
  bool is_undecided() const { return end_ && end_->raised_in_forward; }
  // Blocks until that step has ended on all ranks: another one may begin. Returns whether gradients that this rank has
  // kept become None: some rank could not keep its own.
  bool await_end(std::unique_lock<std::mutex>& lock) {
    if (!end_) return false;
    const End end = *end_;
    lock.unlock();
    averaging_.communicator->wait(end.work, raise_pending_signal);
    lock.lock();
    end_.reset();
    return end.raised_in_forward && *end.loses_gradients != 0;
  }

 private:
  const Averaging& averaging_;
  uint64_t step_ = 0;        // so far; as many on all ranks
  uint64_t ended_well_ = 0;  // the last backward that did

  struct End {
    std::shared_ptr<Work> work;
    std::shared_ptr<uint8_t> loses_gradients;  // on this rank; when the work has ended, on any
    bool raised_in_forward;
  };
  std::optional<End> end_;
};

}  // namespace syncengine
