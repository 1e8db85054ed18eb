#include "bindings/device.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>

#include <mutex>
#include <optional>
#include <thread>

#include "bindings/device_queue.h"
#include "bindings/errors.h"
#include "cuda/device_group.h"
#include "reducer/python_error.h"

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
    if (timeout) wait_on_host(Deadline::after(seconds(*timeout)));
    done_.block(current_stream(target_.device()));
    std::call_once(delivered_, [this] {
      at::NoGradGuard no_grad;
      if (result_.defined()) target_.copy_(result_);
      result_.reset();
    });
  }
  bool is_completed() const override { return done_.query(); }
  py::object exception() const override {
    try {
      communicator_->throw_if_failed();
    } catch (const Error& error) {
      return to_python(error);
    }
    return py::none();
  }

 private:
  void wait_on_host(Deadline deadline) {
    py::gil_scoped_release nogil;
    auto interrupted = check_signals();
    while (!done_.query()) {
      communicator_->throw_if_failed();
      interrupted();
      if (deadline.passed()) {
        const std::string text = "Work.wait(timeout): a CUDA collective has not ended in time";
        communicator_->abort(ErrorKind::Timeout, text);
        throw Error(ErrorKind::Timeout, text);
      }
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }

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
    if (!to.is_same(from)) to.view({-1}).copy_(from.reshape({-1}));
  } else {
    auto queue = queue_of(communicator, device);
    if (async_op) {
      stream = queue->side();
      order_streams(current, stream);
      keep_for(stream, from);
      keep_for(stream, to);
    }
    void* handle = handle_of(stream);
    py::gil_scoped_release nogil;
    queue->run(operation, stream, handle);
  }
  if (async_op) return std::make_unique<CudaWork>(communicator, stream, from, to, target, result);
  if (result.defined()) target.copy_(result);
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
  auto queue = queue_of(communicator, device);
  py::gil_scoped_release nogil;
  return queue->empty(sizes, bytes, type);
}

}  // namespace syncengine
