#include "reducer/backward/outcome.h"

#include <utility>

#include "base/error.h"
#include "reducer/backward/backward.h"
#include "reducer/backward/peers.h"
#include "reducer/backward/texts.h"
#include "reducer/torch/python_error.h"

namespace syncengine {

Masks Abandoned::masks() const {
  Masks all;
  for (const auto& memory : buckets) all.add(memory->flags);
  return all;
}

void Outcome::check_usable() const {
  if (unusable_) throw Error(ErrorKind::InvalidUsage, *unusable_);
}

void Outcome::lose(const std::string& text) {
  last_error = text;
  lost = true;
}

void Outcome::give_up(const Reason& reason) {
  lose(reason.text);
  not_averaged = "the last backward was abandoned (" + reason.text + ")";
  if (reason.for_good) unusable_ = reason.text;
}

bool Outcome::abandon(Backward& backward, const Reason& reason, bool keeps_gradients) {
  if (!backward.can_be_abandoned()) return false;
  Abandoned left = backward.abandon(keeps_gradients);
  given_up_.emplace(GivenUp{std::move(left), reason, exchange(begun_, reason)});
  auto works = given_up_->left.works;
  works.push_back(given_up_->reasons.work());
  // What the communicator keeps must not keep the communicator.
  auto shared = [left = given_up_->left, all = given_up_->reasons.agreement(), reasons = given_up_->reasons.work(),
                 everybody = everybody(), communicator = averaging_.communicator.get()]() -> std::optional<bool> {
    for (const auto& work : left.works) communicator->wait(work, raise_pending_signal);
    const Masks masks = left.masks();
    if (masks.dropped_by != 0 && masks.dropped_by != everybody) return false;
    if (!masks.ask_why()) return std::nullopt;
    communicator->wait(reasons, raise_pending_signal);
    return all();
  };
  averaging_.communicator->set_last_words(said_here(*averaging_.communicator, reason.text), std::move(works), shared);
  return true;
}

void Outcome::await_peers(std::unique_lock<std::mutex>& lock) {
  if (!given_up_) return;
  auto [left, reason, reasons] = *std::exchange(given_up_, std::nullopt);
  lock.unlock();
  for (const auto& work : left.works) averaging_.communicator->wait(work, raise_pending_signal);
  const Masks masks = left.masks();
  check_dropped(masks.dropped_by);
  std::optional<Reason> gravest;
  if (masks.ask_why()) gravest = reasons.wait();
  lock.lock();
  averaging_.communicator->set_last_words("", {});
  has_dropped_ = !masks.ask_why();
  if (gravest && gravest->for_good) {
    unusable_ = gravest->text;
    throw Error(gravest->kind, *unusable_);
  }
}

void Outcome::check(Backward& backward, std::mutex& mutex) {
  Communicator& communicator = *averaging_.communicator;
  const Masks& masks = backward.masks();
  check_dropped(masks.dropped_by);
  if (!masks.ask_why()) return;
  const auto reason = exchange(begun_, std::nullopt).wait();
  if (!reason) return;
  for (const Bucket& bucket : backward.buckets()) {
    if (bucket.work) communicator.wait(bucket.work);
  }
  if (reason->for_good) {
    std::lock_guard lock(mutex);
    unusable_ = reason->text;
  } else {
    communicator.abort(ErrorKind::Aborted, reason->text);
  }
  throw Error(reason->kind, reason->text);
}

void Outcome::check_dropped(uint64_t dropped_by) const {
  if (dropped_by == 0 || dropped_by == everybody()) return;
  Communicator& communicator = *averaging_.communicator;
  std::string ranks;
  for (int member = 0; member < communicator.size(); ++member) {
    if (!(dropped_by >> member & 1)) continue;
    ranks += (ranks.empty() ? "rank " : ", ") + std::to_string(communicator.global_ranks()[member]);
  }
  const std::string text = ranks + ": " + dropped_text(parameters_);
  communicator.abort(ErrorKind::Aborted, text);
  throw Error(ErrorKind::Aborted, text);
}

void Outcome::end_well(uint64_t backward) {
  ended_well_ = backward;
  lost = false;
  not_averaged.clear();
}

void Outcome::drop(bool outlives_errors) {
  if (std::exchange(has_dropped_, true)) return;
  if (outlives_errors) {
    exchange(begun_, std::nullopt);  // as those that have given it up, so that all announce it equally often
  } else {
    tell_peers(*averaging_.communicator, dropped_text(parameters_));
  }
}

}  // namespace syncengine
