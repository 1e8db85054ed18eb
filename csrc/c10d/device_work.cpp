// TorchBackend on CUDA tensors: what is called is queued on streams, and nobody waits on the host.
#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>

#include "c10d/backend.h"
#include "reducer/torch/python_error.h"
#include "streams/queue.h"

namespace syncengine {

namespace {

// Its future is complete from the start, as NCCL's is: who takes its value waits on a stream.
class DeviceWork final : public ::c10d::Work {
 public:
  // Of what `stream` has by now.
  DeviceWork(std::shared_ptr<Communicator> communicator, c10::Stream stream, ::c10d::OpType type, uint64_t number,
             std::vector<at::Tensor> results)
      : ::c10d::Work(communicator->rank(), type),
        communicator_(std::move(communicator)),
        device_(stream.device()),
        done_(kDeviceType),
        number_(number),
        results_(std::move(results)),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                         std::vector<c10::Device>{device_})) {
    done_.record(stream);
    const c10::StreamGuard guard(stream);
    future_->markCompleted(c10::IValue(results_));
  }

  bool isCompleted() override { return done_.query() || exception() != nullptr; }
  bool isSuccess() const override { return done_.query() && exception() == nullptr; }
  std::exception_ptr exception() const override {
    try {
      communicator_->throw_if_failed();
    } catch (...) {
      return std::current_exception();
    }
    return nullptr;
  }
  std::vector<at::Tensor> result() override { return results_; }
  uint64_t getSequencenumber() const override { return number_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  // The current stream waits, not the host: unless there is a limit, which only a host can keep.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override {
    communicator_->throw_if_failed();
    if (timeout > kNoTimeout)
      wait_on_host(*communicator_, done_, Deadline::after(timeout), "Work.wait(timeout)", raise_pending_signal);
    synchronize();
    return true;
  }
  void synchronize() override { done_.block(current_stream(device_)); }
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
  std::vector<at::Tensor> results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// The result of the only rank is what it gave.
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

// The stream of calls that nobody waits for at once: behind what the current one has.
c10::Stream TorchBackend::stream_aside(const Call& call) {
  const c10::Stream current = current_stream(call.device());
  if (size_ == 1) return current;
  const c10::Stream side = queue_of(communicator_, call.device(), raise_pending_signal)->side();
  order_streams(current, side);
  for (const c10::Storage& memory : call.memory()) keep_for(side, memory);
  return side;
}

TorchBackend::TorchWorkPtr TorchBackend::start_on_device(Call call, const How& how) {
  const bool aside = how.async || call.coalesced;
  const c10::Stream stream = aside ? stream_aside(call) : current_stream(call.device());
  for (const Operation& operation : call.operations()) {
    if (size_ == 1)
      copy_to_output(operation, call.device());
    else
      queue_of(communicator_, call.device(), raise_pending_signal)->run(operation, stream, handle_of(stream));
  }
  if (call.to_be_counted) count(call);
  if (auto coalesced = std::move(call.coalesced)) {
    coalesced->call.absorb(std::move(call));
    coalescing_.give(std::move(coalesced));
    return nullptr;
  }
  const uint64_t number = call.number;
  if (how.async) return finish_on_device(std::move(call), stream, how.type, number);
  call.deliver();
  return nullptr;
}

TorchBackend::TorchWorkPtr TorchBackend::finish_on_device(Call call, c10::Stream stream, ::c10d::OpType type,
                                                          uint64_t number) {
  const c10::StreamGuard guard(stream);
  call.deliver();
  return c10::make_intrusive<DeviceWork>(communicator_, stream, type, number, std::move(call.results()));
}

}  // namespace syncengine
