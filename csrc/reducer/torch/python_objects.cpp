
#include "reducer/torch/python_objects.h"

#include <condition_variable>
#include <memory>
#include <mutex>

#include "reducer/torch/python_error.h"

namespace syncengine {

namespace {

constexpr auto kTick = std::chrono::milliseconds(50);

// Shared with the future's callback, which outlives the wait if the future is completed late.
struct Completion {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
};

}  // namespace

void wait_for_future(const TorchFuture& future, Communicator& communicator, const std::function<std::string()>& what) {
  auto deadline = Deadline::after(communicator.timeout());
  if (!future->completed()) {
    auto completion = std::make_shared<Completion>();
    future->addCallback(
        [completion](c10::ivalue::Future&) {
          std::lock_guard lock(completion->mutex);
          completion->done = true;
          completion->changed.notify_all();
        },
        /*uses_future=*/false);
    std::unique_lock lock(completion->mutex);
    while (!completion->changed.wait_for(lock, kTick, [&] { return completion->done; })) {
      lock.unlock();
      raise_pending_signal();
      communicator.check_peers();
      if (deadline.passed()) throw Error(ErrorKind::Timeout, what() + " has not ended within the timeout");
      lock.lock();
    }
  }
  if (future->hasError()) std::rethrow_exception(future->exception_ptr());
  future->wait();  // makes the current streams wait; the host has waited
}

}  // namespace syncengine
