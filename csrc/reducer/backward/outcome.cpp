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
  auto unread = std::exchange(unread_, std::nullopt);
  Reasons reasons = unread ? *unread : exchange(reason);
  given_up_.emplace(GivenUp{std::move(left), reason, std::move(reasons), unread.has_value()});
  auto works = given_up_->left.works;
  works.push_back(given_up_->reasons.work());
  // What the communicator keeps must not keep the communicator.
  auto shared = [left = given_up_->left, reused = given_up_->reused, all = given_up_->reasons.agreement(),
                 reasons = given_up_->reasons.work(),
                 communicator = averaging_.communicator.get()]() -> std::optional<bool> {
    for (const auto& work : left.works) communicator->wait(work, raise_pending_signal);
    if (reused || left.masks().abandoned_by == 0) return std::nullopt;  // the next backward tells
    communicator->wait(reasons, raise_pending_signal);
    return all();
  };
  averaging_.communicator->set_last_words(said_here(*averaging_.communicator, reason.text), std::move(works), shared);
  return true;
}

void Outcome::await_peers(std::unique_lock<std::mutex>& lock) {
  if (!given_up_) return;
  auto [left, reason, reasons, reused] = *std::exchange(given_up_, std::nullopt);
  lock.unlock();
  for (const auto& work : left.works) averaging_.communicator->wait(work, raise_pending_signal);
  const Masks masks = left.masks();
  bool all_hear = masks.abandoned_by != 0;  // of it, and say why, or that they wait
  if (!all_hear) {
    if (reused && masks.dropped_by == everybody()) {
      reasons.wait();  // the exchange was about the backward before, and all others have taken it so
      reasons = exchange(reason);
    }
    check_dropped(masks.dropped_by);
    all_hear = masks.left_by != 0;
  }
  std::optional<Reason> gravest;
  if (all_hear) gravest = reasons.wait();
  lock.lock();
  averaging_.communicator->set_last_words("", {});
  if (!all_hear) {
    unread_ = std::move(reasons);
    has_dropped_ = true;
  } else if (gravest && gravest->for_good) {
    unusable_ = gravest->text;
    throw Error(gravest->kind, *unusable_);
  }
}

void Outcome::await_weights(std::unique_lock<std::mutex>& lock) {
  if (!weights_) return;
  Reasons weights = *std::exchange(weights_, std::nullopt);
  lock.unlock();
  if (const auto reason = weights.wait()) {
    averaging_.communicator->abort(ErrorKind::Aborted, reason->text);
    throw Error(ErrorKind::Aborted, reason->text);
  }
  lock.lock();
}

void Outcome::check(Backward& backward, std::mutex& mutex) {
  Communicator& communicator = *averaging_.communicator;
  const auto [abandoned_by, dropped_by, left_by] = backward.masks();
  auto unread = std::exchange(unread_, std::nullopt);
  std::optional<Reason> reason;
  if (abandoned_by != 0) {
    reason = (unread ? *unread : exchange(std::nullopt)).wait();
    if (!reason) reason = Reason{"a rank has abandoned this backward", false};
  } else {
    if (unread && dropped_by == everybody()) communicator.wait(unread->work());
    check_dropped(dropped_by);
    if (left_by != 0) reason = exchange(std::nullopt).wait();
  }
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
  has_dropped_ = lost = false;
  not_averaged.clear();
}

void Outcome::drop(bool outlives_errors) {
  has_dropped_ = true;
  if (!outlives_errors) {
    tell_peers(*averaging_.communicator, dropped_text(parameters_));
  } else if (!unread_) {
    unread_ = exchange(Reason{dropped_text(parameters_), false});
  }
}

}  // namespace syncengine
