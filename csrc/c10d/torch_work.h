// The work that an asynchronous call returns: the engine's works of that call, and the delivery of their results.
//
// Ownership: shared; dropping it does not cancel the call, and InFlight keeps calls whose results go through copies.
// Thread-safety: any thread. Failure: wait() throws the engine's Error, or the exception of the delivery, whichever
// thread delivered; a future gets it. A delivery's error that nobody has asked for ends as a warning.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "base/deadline.h"
#include "c10d/call.h"
#include "engine/communicator/communicator.h"

namespace syncengine {

class Completer;

// The text of an exception, without torch's backtrace.
std::string text_of(const std::exception_ptr& error);

using TorchWorkPtr = c10::intrusive_ptr<::c10d::Work>;

class TorchWork final : public ::c10d::Work {
 public:
  struct CallOrigin {
    std::shared_ptr<Communicator> communicator;
    std::shared_ptr<Completer> completer = {};  // null if nobody asks for a future
    ::c10d::OpType type = ::c10d::OpType::UNKNOWN;
    std::optional<Duration> at_most = {};  // limit from now on, after which a wait fails the communicator
  };
  using Works = std::vector<std::shared_ptr<syncengine::Work>>;
  TorchWork(CallOrigin origin, Call call, Works works);
  // Makes a work and adds its call to InFlight, so that later calls wait for it where they must, and deliver it.
  static c10::intrusive_ptr<TorchWork> in_flight(CallOrigin origin, Call call, Works works);
  ~TorchWork() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override { return call_.source(); }
  std::vector<at::Tensor> result() override { return call_.results(); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  void abort() override;
  uint64_t getSequencenumber() const override { return call_.number; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  // Called by the completer. await_end() drops errors, since complete_future() waits again, and gives them to the
  // future; `meanwhile` is called about every 50 ms.
  void await_end(const std::function<void()>& meanwhile) noexcept;
  void complete_future();
  bool ended() const {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->ended(); });
  }
  bool is_late() const { return origin_.at_most && deadline_.passed() && !ended(); }
  // Copies the results into the caller's tensors, once, after the collective has ended well. Keeps an error for
  // deliver_or_throw().
  void deliver();
  // Delivers the results of earlier works that have ended, then this work's. Throws the error that deliver() has kept.
  void deliver_or_throw();

 private:
  void wait_for_works(std::optional<Duration> at_most, const std::function<void()>& interrupted);
  void deliver_this_too();
  std::exception_ptr delivery_error() const;

  CallOrigin origin_;
  Works works_;
  Deadline deadline_;
  std::once_flag delivered_;
  std::exception_ptr delivery_error_;
  std::atomic<bool> undeliverable_{false};  // delivery_error_ is set
  mutable std::atomic<bool> is_told_{false};
  Call call_;
  std::once_flag future_made_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Runs the only operation of a call on the CPU, and delivers its result.
void run_call(Communicator& communicator, Call& call);
// Begins the operations of a call, and its messages.
TorchWork::Works submit_call(Communicator& communicator, Call& call);

// Queues a call's operations on CUDA tensors; returns their stream: the current one, or if nobody needs the result at
// once (`aside`), the communicator's side stream, behind what the current one has. Only a communicator's first call on
// a device waits on the host, for the other ranks.
c10::Stream queue_on_device(const std::shared_ptr<Communicator>& communicator, Call& call, bool aside);
// Delivers the results of a queued call on `stream`. The future of its work is complete from the start, as NCCL's is: a
// callback that takes its value waits on a stream.
TorchWorkPtr finish_on_device(TorchWork::CallOrigin origin, Call call, c10::Stream stream);

// The threads that complete futures, and so run their callbacks. A callback may run Python code, wait for the GIL, make
// calls, or wait for other futures, none of which the engine's own thread may do. While such a thread waits, it drives
// the engine, as every thread does.
//
// One thread at a time has the turn: it waits for a work, then runs its future's callbacks, so that these run one after
// another. A callback that blocks must not keep other futures from completing: the turn passes to another thread when
// the callback requests a future itself, or has not returned within kPatience. So there are at most as many threads as
// callbacks have blocked at one time, plus two: one that has the turn, and one that waits for it.
//
// Ownership: shared by the backend, its works and the threads, which begin with the first future, and end after stop().
// Thread-safety: any thread. Failure: a work's error goes to its future.

class Completer : public std::enable_shared_from_this<Completer> {
 public:
  enum class Order {
    AsAdded,  // collectives end in the order of their calls: waits for the first
    AsEnded,  // messages don't: looks at all of them, every millisecond while there are any
  };
  explicit Completer(Order order) : order_(order) {}

  // Completes the work's future once the work has ended. If a callback of a future calls this, the callback is expected
  // to wait for another future next, and gives up the turn.
  void add(c10::intrusive_ptr<TorchWork> work);

  // Waits until all works have ended, well or not, then ends the threads, which nothing else ends. Called without the
  // GIL.
  void stop();

 private:
  using Lock = std::unique_lock<std::mutex>;
  static constexpr std::chrono::milliseconds kPatience{10};
  static constexpr Clock::time_point kNever = Clock::time_point::max();

  void run();
  bool take_turn(Lock& lock);
  c10::intrusive_ptr<TorchWork> next(Lock& lock);
  void keep_deadlines();
  void call_another();
  void pass_turn_on();

  Order order_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<TorchWork>> works_;
  bool stopped_ = false;
  std::vector<std::thread> threads_;
  size_t idle_ = 0;              // threads that wait for the turn
  std::thread::id holder_;       // the thread that has the turn
  Clock::time_point turn_ends_;  // while the holder runs callbacks: when another thread may take the turn
};

}  // namespace syncengine
