#include "c10d/torch_work.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string>

#include "c10d/in_flight.h"
#include "reducer/torch/python_error.h"
#include "streams/queue.h"
#include "streams/without_gil.h"

namespace syncengine {

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& thrown) {
    return thrown.what_without_backtrace();
  } catch (const std::exception& thrown) {
    return thrown.what();
  }
}

TorchWork::TorchWork(CallOrigin origin, Call call, Works works)
    : ::c10d::Work(origin.communicator->rank(), origin.type),
      origin_(std::move(origin)),
      works_(std::move(works)),
      deadline_(origin_.at_most ? Deadline::after(*origin_.at_most) : Deadline::never()),
      call_(std::move(call)) {}

c10::intrusive_ptr<TorchWork> TorchWork::in_flight(CallOrigin origin, Call call, Works works) {
  InFlight::PendingCall follows{.memory = call.extents().vec(),
                                .communicator = origin.communicator,
                                .works = {works.begin(), works.end()},
                                .by_messages = !call.mail().empty()};
  const bool delivers = call.delivers();
  auto work = c10::make_intrusive<TorchWork>(std::move(origin), std::move(call), std::move(works));
  if (delivers)
    follows.deliver = [work] {
      if (work->isSuccess()) work->deliver();
    };
  if (delivers || !follows.memory.empty()) InFlight::of_process().add(std::move(follows));
  return work;
}

TorchWork::~TorchWork() {
  if (undeliverable_.load(std::memory_order_acquire) && !is_told_.load(std::memory_order_relaxed))
    TORCH_WARN("syncengine: ", call_.name(), ": its result was not put into its tensor: ", text_of(delivery_error_));
}

bool TorchWork::isCompleted() {
  if (!ended()) return false;
  const WithoutGil without_gil;  // another thread may be delivering
  if (isSuccess()) deliver_this_too();
  return true;
}

bool TorchWork::isSuccess() const {
  return !undeliverable_.load(std::memory_order_acquire) &&
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

bool TorchWork::wait(std::chrono::milliseconds timeout) {
  const WithoutGil without_gil;  // torch calls synchronize() with the GIL
  std::optional<Duration> at_most;
  if (timeout > kNoTimeout) at_most = seconds(std::chrono::duration<double>(timeout).count());  // or an int overflows
  wait_for_works(at_most, raise_pending_signal);
  deliver_or_throw();
  return true;
}

void TorchWork::wait_for_works(std::optional<Duration> at_most, const std::function<void()>& interrupted) {
  if (origin_.at_most) at_most = deadline_.left(at_most.value_or(*origin_.at_most));
  const auto deadline = at_most ? Deadline::after(*at_most) : Deadline::never();  // one deadline for all works together
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
}

// Delivers this call's results after those of earlier calls that have ended, whose works the program may have dropped.
void TorchWork::deliver_this_too() {
  InFlight::of_process().deliver_ended();
  deliver();
}

void TorchWork::deliver_or_throw() {
  deliver_this_too();
  if (auto error = delivery_error()) std::rethrow_exception(error);
}

void TorchWork::abort() {
  auto& communicator = *origin_.communicator;
  communicator.abort(ErrorKind::Aborted, "rank " + std::to_string(communicator.global_ranks()[communicator.rank()]) +
                                             " aborted its " + call_.name());
}

c10::intrusive_ptr<c10::ivalue::Future> TorchWork::getFuture() {
  const WithoutGil without_gil;  // another thread may be making the future
  std::call_once(future_made_, [this] {
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
  } catch (...) {  // the work has failed, and its future gets the error
  }
}

void TorchWork::complete_future() {
  try {
    wait_for_works({}, {});
    deliver_or_throw();
  } catch (...) {
    return future_->setError(std::current_exception());
  }
  future_->markCompleted(c10::IValue(call_.results()));
}

void run_call(Communicator& communicator, Call& call) {
  communicator.run(std::move(call.operations()[0]), raise_pending_signal);
  InFlight::of_process().deliver_ended();
  call.deliver();
}

TorchWork::Works submit_call(Communicator& communicator, Call& call) {
  TorchWork::Works works;
  for (Operation& operation : call.operations()) works.push_back(communicator.submit(std::move(operation)));
  for (Call::Mail& mail : call.mail())
    works.push_back(mail.sends ? communicator.send(std::move(mail.message))
                               : communicator.receive(std::move(mail.message)));
  return works;
}

namespace {

class DeviceWork final : public ::c10d::Work {
 public:
  // A work that ends when `stream` has done all that is queued there now.
  DeviceWork(TorchWork::CallOrigin origin, c10::Stream stream, uint64_t number, std::vector<at::Tensor> results)
      : ::c10d::Work(origin.communicator->rank(), origin.type),
        communicator_(std::move(origin.communicator)),
        device_(stream.device()),
        done_(kDeviceType),
        number_(number),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                         std::vector<c10::Device>{device_})) {
    done_.record(stream);
    const c10::StreamGuard guard(stream);
    future_->markCompleted(c10::IValue(std::move(results)));
  }

  ~DeviceWork() override {
    drop_on(device_, done_);
    drop_on(device_, future_);  // has events of its own
  }

  // Even after a failure, true only when the device does not touch the memory any more.
  bool isCompleted() override { return done_.query(); }
  bool isSuccess() const override { return done_.query() && exception() == nullptr; }
  std::exception_ptr exception() const override {
    try {
      communicator_->throw_if_failed();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }
  std::vector<at::Tensor> result() override { return future_->constValue().toTensorVector(); }
  uint64_t getSequencenumber() const override { return number_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  // Makes the current stream wait instead of the host, unless there is a limit, which only a host can keep.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    communicator_->throw_if_failed();
    if (timeout > kNoTimeout)
      wait_on_host(*communicator_, done_, Deadline::after(seconds(std::chrono::duration<double>(timeout).count())),
                   "Work.wait(timeout)", raise_pending_signal);
    synchronize();
    return true;
  }
  void synchronize() override {
    const c10::DeviceGuard use(device_);
    done_.block(current_stream(device_));
  }
  void blockCurrentStream() override { synchronize(); }
  void abort() override {
    std::string who = "rank " + std::to_string(communicator_->global_ranks()[communicator_->rank()]);
    communicator_->abort(ErrorKind::Aborted, who + " aborted a call on " + device_.str());
  }

 private:
  std::shared_ptr<Communicator> communicator_;
  c10::Device device_;
  c10::Event done_;
  uint64_t number_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Copies the input to the output, which is all that a group of one rank does.
void copy_to_output(const Operation& operation, c10::Device device) {
  auto bytes_of = [device](const Span& span) {
    return at::for_blob(span.data, {static_cast<int64_t>(span.bytes)})
        .options(at::TensorOptions().dtype(at::kByte).device(device))
        .target_device(device)
        .make_tensor();
  };
  const auto &from = operation.input.spans(), &to = operation.output.spans();
  for (size_t i = 0; i < from.size(); ++i)
    if (from[i].data != to[i].data) bytes_of(to[i]).copy_(bytes_of(from[i]));
}

}  // namespace

c10::Stream queue_on_device(const std::shared_ptr<Communicator>& communicator, Call& call, bool aside) {
  const c10::Stream current = current_stream(call.device());
  if (communicator->size() == 1) {
    communicator->throw_if_failed();
    for (const Operation& operation : call.operations()) {
      require_supported(operation);
      copy_to_output(operation, call.device());
    }
    return current;
  }
  const auto queue = queue_of(communicator, call.device(), raise_pending_signal);
  const c10::Stream stream = aside ? queue->side() : current;
  if (aside) {
    order_streams(current, stream);
    for (const c10::Storage& memory : call.memory()) keep_for(stream, memory);
  }
  for (const Operation& operation : call.operations()) queue->run(operation, stream, handle_of(stream));
  return stream;
}

TorchWorkPtr finish_on_device(TorchWork::CallOrigin origin, Call call, c10::Stream stream) {
  const c10::StreamGuard guard(stream);
  call.deliver();
  return c10::make_intrusive<DeviceWork>(std::move(origin), stream, call.number, std::move(call.results()));
}

}  // namespace syncengine
