// The future of one collective on this rank.
//
// Ownership: shared; dropping it does not cancel the operation. Thread-safety: any thread may poll; Communicator::wait
// waits.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>

namespace syncengine {

class Work {
 public:
  struct Tally {
    std::atomic<uint64_t> outstanding{0}, ended{0};
  };

  Work() = default;
  // Counts itself in `tally`, as outstanding until it has ended.
  explicit Work(Tally& tally) : tally_(&tally) { ++tally.outstanding; }

  enum class State : uint8_t { Pending, Done, Failed };

  State state() const { return state_.load(std::memory_order_acquire); }  // acquire: results are visible after Done
  bool ended() const { return state() != State::Pending; }
  std::exception_ptr error() const { return error_; }  // valid once state() == Failed
  void rethrow_if_failed() const {
    if (state() == State::Failed) std::rethrow_exception(error_);
  }

  // Identifies the operation: in the user lane by its number; in the scheduled lane by its slot and its step's number.
  struct Place {
    int lane = 0;
    uint64_t number = 0;
    uint64_t epoch = 0;
    bool operator==(const Place&) const = default;
  };

  // The members below are for the engine only, under its progress lock.
  Place place;
  void finish() { end(State::Done); }
  void fail(std::exception_ptr error) {
    error_ = std::move(error);
    end(State::Failed);
  }

 private:
  void end(State state) {
    if (tally_) {
      ++tally_->ended;
      --tally_->outstanding;
    }
    state_.store(state, std::memory_order_release);  // release: results and error before the state; last touch of *this
  }

  Tally* tally_ = nullptr;
  std::atomic<State> state_{State::Pending};
  std::exception_ptr error_;
};

}  // namespace syncengine
