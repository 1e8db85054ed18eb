#include "bindings/device.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>

#include <mutex>
#include <optional>

#include "bindings/bindings.h"
#include "cuda/device_group.h"
#include "reducer/torch/tensors.h"
#include "streams/queue.h"

namespace py = pybind11;

namespace syncengine {

namespace {

class CudaWork final : public PyWork {
 public:
  CudaWork(std::shared_ptr<Communicator> communicator, c10::Stream side, at::Tensor from, at::Tensor to,
           at::Tensor target, at::Tensor result)
      : communicator_(std::move(communicator)),
        done_(kDeviceType),
        from_(std::move(from)),
        to_(std::move(to)),
        target_(std::move(target)),
        result_(std::move(result)) {
    done_.record(side);
  }

  // The current stream waits, not the host: unless there is a limit, which only a host can keep.
  void wait(std::optional<double> timeout) override {
    communicator_->throw_if_failed();
    if (timeout) {
      py::gil_scoped_release nogil;
      wait_on_host(*communicator_, done_, Deadline::after(seconds(*timeout)), "Work.wait(timeout)",
                   raise_pending_signal);
    }
    done_.block(current_stream(target_.device()));
    std::call_once(delivered_, [this] {
      if (result_.defined()) assign(target_, result_);
      result_.reset();
    });
  }
  bool is_completed() const override { return done_.query(); }
  py::object exception() const override {
    return exception_of([this] { communicator_->throw_if_failed(); });
  }

 private:
  std::shared_ptr<Communicator> communicator_;
  c10::Event done_;
  at::Tensor from_, to_, target_, result_;
  std::once_flag delivered_;
};

}  // namespace

std::unique_ptr<PyWork> run_on_device(const std::shared_ptr<Communicator>& communicator, Operation operation,
                                      const at::Tensor& from, const at::Tensor& to, const at::Tensor& target,
                                      const at::Tensor& result, bool async_op) {
  at::NoGradGuard no_grad;
  const c10::Device device = from.device();
  const c10::Stream current = current_stream(device);
  c10::Stream stream = current;
  if (communicator->size() == 1) {
    communicator->throw_if_failed();
    require_supported(operation);
    if (!to.is_same(from)) assign(to.view({-1}), from.reshape({-1}));
  } else {
    py::gil_scoped_release nogil;
    auto queue = queue_of(communicator, device, raise_pending_signal);
    if (async_op) {
      stream = queue->side();
      order_streams(current, stream);
      keep_for(stream, from.storage());
      keep_for(stream, to.storage());
    }
    queue->run(operation, stream, handle_of(stream));
  }
  if (async_op) return std::make_unique<CudaWork>(communicator, stream, from, to, target, result);
  if (result.defined()) assign(target, result);
  return nullptr;
}

at::Tensor empty_on_device(const std::shared_ptr<Communicator>& communicator, const std::vector<int64_t>& sizes,
                           size_t bytes, at::ScalarType type, c10::Device device) {
  if (!device.is_cuda())
    throw Error(ErrorKind::InvalidUsage, "empty: device '" + device.str() + "' is neither a CPU nor a CUDA device");
  if (!device.has_index()) {
    cuda::require_device(0);
    device = c10::impl::VirtualGuardImpl(kDeviceType).getDevice();
  }
  cuda::require_device(device.index());
  if (communicator->size() == 1) return at::empty(sizes, at::TensorOptions().dtype(type).device(device));
  py::gil_scoped_release nogil;
  return queue_of(communicator, device, raise_pending_signal)->empty(sizes, bytes, type, raise_pending_signal);
}

}  // namespace syncengine
