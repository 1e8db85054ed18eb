#include "reducer/backward/outcome.h"

#include "reducer/backward/texts.h"
#include "reducer/torch/python_error.h"

namespace syncengine {

void Outcome::end_well(uint64_t backward) {
  ended_well_ = backward;
  lost = false;
  not_averaged.clear();
}

void Outcome::lose(const std::string& text) {
  last_error = text;
  lost = true;
  not_averaged = "the last backward was given up (" + text + ")";
}

void Outcome::refuse(const std::string& text, bool raised_in_forward) {
  averaging_.communicator->refuse(averaging_.slots, step_, said_here(*averaging_.communicator, text));
  end(raised_in_forward);
}

void Outcome::end(bool raised_in_forward) {
  auto loses_gradients = std::make_shared<uint8_t>(!raised_in_forward);
  auto work = averaging_.communicator->end_refused(averaging_.slots, step_, loses_gradients);
  end_.emplace(End{std::move(work), std::move(loses_gradients), raised_in_forward});
}

bool Outcome::await_end(std::unique_lock<std::mutex>& lock) {
  if (!end_) return false;
  const End end = *end_;
  lock.unlock();
  averaging_.communicator->wait(end.work, raise_pending_signal);
  lock.lock();
  end_.reset();
  return end.raised_in_forward && *end.loses_gradients != 0;
}

}  // namespace syncengine
