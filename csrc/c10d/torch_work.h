// What torch.distributed holds of a call: the engine's works, and the delivery of their results.
//
// Ownership: shared; dropping it does not cancel the call, and if its results go through copies Undelivered keeps it.
// Thread-safety: any thread. Failure: wait() throws the engine's Error, or what its delivery has thrown, whoever made
// that; a future gets it. A delivery's error that nobody has asked for is a warning in the end.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "c10d/call.h"
#include "engine/communicator/communicator.h"

namespace syncengine {

class Completer;
class Undelivered;

class TorchWork final : public ::c10d::Work {
 public:
  struct Origin {
    std::shared_ptr<Communicator> communicator;
    std::shared_ptr<Completer> completer;
    ::c10d::OpType type;
    uint64_t number;
    std::optional<Duration> at_most;  // from now on; past it a wait fails the communicator
    std::shared_ptr<Undelivered> undelivered = {};
  };
  TorchWork(Origin origin, Call call, std::vector<std::shared_ptr<syncengine::Work>> works);
  ~TorchWork() override;

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override { return call_.source(); }
  std::vector<at::Tensor> result() override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  void abort() override;
  uint64_t getSequencenumber() const override { return origin_.number; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  // For the completer. await_end() leaves errors to complete_future(), which waits too; `meanwhile` is called about
  // every 50 ms.
  void await_end(const std::function<void()>& meanwhile) noexcept;
  void complete_future();
  bool ended() const;
  bool is_late() const { return origin_.at_most && deadline_.passed() && !ended(); }
  // Its results, once; after it has ended well. Keeps the error for wait().
  void deliver();

 private:
  void wait_for_works(std::optional<Duration> at_most, const std::function<void()>& interrupted);
  void deliver_this_too();
  std::exception_ptr delivery_error() const;

  Origin origin_;
  std::vector<std::shared_ptr<syncengine::Work>> works_;
  Deadline deadline_;
  std::once_flag delivered_;
  std::exception_ptr delivery_error_;
  std::atomic<bool> undeliverable_{false};  // the error is there
  mutable std::atomic<bool> is_told_{false};
  Call call_;
  const bool delivers_;
  std::once_flag future_made_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace syncengine
