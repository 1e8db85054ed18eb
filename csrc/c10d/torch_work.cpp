#include "c10d/torch_work.h"

#include <c10/util/Exception.h>

#include <string>

#include "c10d/completer.h"
#include "c10d/undelivered.h"
#include "reducer/torch/python_error.h"

namespace syncengine {

namespace {

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& thrown) {
    return thrown.what_without_backtrace();
  } catch (const std::exception& thrown) {
    return thrown.what();
  }
}

}  // namespace

TorchWork::TorchWork(Origin origin, Call call, std::vector<std::shared_ptr<syncengine::Work>> works)
    : ::c10d::Work(origin.communicator->rank(), origin.type),
      origin_(std::move(origin)),
      works_(std::move(works)),
      deadline_(origin_.at_most ? Deadline::after(*origin_.at_most) : Deadline::never()),
      call_(std::move(call)),
      delivers_(call_.delivers()) {}

TorchWork::~TorchWork() {
  if (undeliverable_.load(std::memory_order_acquire) && !is_told_.load(std::memory_order_relaxed))
    TORCH_WARN("syncengine: ", call_.name(), ": its result was not put into its tensor: ", text_of(delivery_error_));
}

bool TorchWork::ended() const {
  return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->ended(); });
}

bool TorchWork::isCompleted() {
  if (!ended()) return false;
  if (isSuccess()) deliver_this_too();
  return true;
}

bool TorchWork::isSuccess() const {
  return !undeliverable_.load(std::memory_order_relaxed) &&
         std::all_of(works_.begin(), works_.end(),
                     [](const auto& work) { return work->state() == syncengine::Work::State::Done; });
}

std::exception_ptr TorchWork::exception() const {
  for (const auto& work : works_) {
    if (work->state() == syncengine::Work::State::Failed) return work->error();
  }
  return delivery_error();
}

std::exception_ptr TorchWork::delivery_error() const {
  if (!undeliverable_.load(std::memory_order_acquire)) return nullptr;
  is_told_.store(true, std::memory_order_relaxed);
  return delivery_error_;
}

std::vector<at::Tensor> TorchWork::result() { return call_.results(); }

bool TorchWork::wait(std::chrono::milliseconds timeout) {
  std::optional<Duration> at_most;
  if (timeout > kNoTimeout) at_most = timeout;
  wait_for_works(at_most, raise_pending_signal);
  deliver_this_too();
  if (auto error = delivery_error()) std::rethrow_exception(error);
  return true;
}

void TorchWork::wait_for_works(std::optional<Duration> at_most, const std::function<void()>& interrupted) {
  if (origin_.at_most) at_most = deadline_.left(at_most.value_or(*origin_.at_most));
  const auto deadline = at_most ? Deadline::after(*at_most) : Deadline::never();  // of all of them together
  for (const auto& work : works_) {
    if (at_most) at_most = deadline.left(*at_most);
    origin_.communicator->wait(work, interrupted, at_most);
  }
}

void TorchWork::deliver() {
  std::call_once(delivered_, [this] {
    try {
      call_.deliver();
    } catch (...) {
      delivery_error_ = std::current_exception();
      undeliverable_.store(true, std::memory_order_release);
    }
  });
  if (delivers_) origin_.undelivered->remove(*this);
}

// In the order of the calls: those before it, which may have been dropped, come first.
void TorchWork::deliver_this_too() {
  origin_.undelivered->deliver_ended();
  deliver();
}

void TorchWork::abort() {
  auto& communicator = *origin_.communicator;
  communicator.abort(ErrorKind::Aborted, "rank " + std::to_string(communicator.global_ranks()[communicator.rank()]) +
                                             " aborted its " + call_.name());
}

c10::intrusive_ptr<c10::ivalue::Future> TorchWork::getFuture() {
  std::call_once(future_made_, [this] {
    for (const auto& work : works_) work->await();
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    if (ended())
      complete_future();
    else
      origin_.completer->add(c10::intrusive_ptr<TorchWork>::unsafe_reclaim_from_nonowning(this));
  });
  return future_;
}

void TorchWork::await_end(const std::function<void()>& meanwhile) noexcept {
  try {
    wait_for_works({}, meanwhile);
  } catch (...) {  // it has failed: its future gets it
  }
}

void TorchWork::complete_future() {
  try {
    wait_for_works({}, {});
    deliver_this_too();
    if (auto error = delivery_error()) std::rethrow_exception(error);
  } catch (...) {
    return future_->setError(std::current_exception());
  }
  future_->markCompleted(c10::IValue(call_.results()));
}

}  // namespace syncengine
