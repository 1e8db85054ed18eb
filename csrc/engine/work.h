// The future of one collective on this rank.
//
// Ownership: shared; dropping it does not cancel the operation. Thread-safety: any thread may poll; Communicator::wait waits.
#pragma once

#include <atomic>
#include <exception>
#include <mutex>

namespace syncengine {

class Work {
 public:
  enum class State : uint8_t { Queued, Running, Done, Failed };

  State state() const { return state_.load(std::memory_order_acquire); }  // acquire: results are visible after Done
  bool ended() const { return state() >= State::Done; }
  std::exception_ptr error() const { return error_; }                     // valid once state() == Failed
  void rethrow_if_failed() const {
    if (state() == State::Failed) std::rethrow_exception(error_);
  }

  // For the engine only, under its progress lock.
  void start() { state_.store(State::Running, std::memory_order_relaxed); }
  void finish() { state_.store(State::Done, std::memory_order_release); }
  void fail(std::exception_ptr error) {
    error_ = std::move(error);
    state_.store(State::Failed, std::memory_order_release);
  }

 private:
  std::atomic<State> state_{State::Queued};
  std::exception_ptr error_;
};

}  // namespace syncengine
