#include "c10d/torch_device_transport.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <string>
#include <vector>

#include "base/error.h"
#include "streams/queue.h"

namespace syncengine {

TorchDeviceTransport::TorchDeviceTransport(c10::intrusive_ptr<::c10d::Backend> backend, int device)
    : backend_(std::move(backend)), device_(kDeviceType, static_cast<c10::DeviceIndex>(device)) {}

// NCCL connects ranks by the first call of a kind, on the host.
void TorchDeviceTransport::connect() {
  const c10::DeviceGuard guard(device_);
  const int64_t bytes = 64, size = backend_->getSize();
  const auto options = at::TensorOptions().dtype(at::kByte).device(device_);
  const at::Tensor from = at::empty({size * bytes}, options), to = at::empty({size * bytes}, options);
  auto data = [](const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); };
  all_to_all(data(to), data(from), bytes);
  all_gather(data(to), data(from), bytes);
  broadcast(data(to), bytes, 0);
  current_stream(device_).synchronize();
}

void TorchDeviceTransport::all_to_all(std::byte* to, const std::byte* from, size_t bytes) {
  queue("all_to_all", [&] {
    at::Tensor output = tensor(to, bytes * backend_->getSize()), input = tensor(from, bytes * backend_->getSize());
    std::vector<int64_t> equal_parts;
    return backend_->alltoall_base(output, input, equal_parts, equal_parts);
  });
}

void TorchDeviceTransport::all_gather(std::byte* to, const std::byte* from, size_t bytes) {
  queue("all_gather", [&] {
    at::Tensor output = tensor(to, bytes * backend_->getSize()), input = tensor(from, bytes);
    return backend_->_allgather_base(output, input);
  });
}

void TorchDeviceTransport::broadcast(std::byte* memory, size_t bytes, int root) {
  queue("broadcast", [&] {
    std::vector<at::Tensor> tensors{tensor(memory, bytes)};
    ::c10d::BroadcastOptions options;
    options.rootRank = root;
    return backend_->broadcast(tensors, options);
  });
}

void TorchDeviceTransport::abort() {
  if (!aborted_.exchange(true)) backend_->abort();
}

void TorchDeviceTransport::close() {
  if (!aborted_.exchange(true)) backend_->shutdown();
  backend_.reset();
}

at::Tensor TorchDeviceTransport::tensor(const std::byte* memory, size_t bytes) const {
  return at::for_blob(const_cast<std::byte*>(memory), {static_cast<int64_t>(bytes)})
      .options(at::TensorOptions().dtype(at::kByte).device(device_))
      .target_device(device_)
      .make_tensor();
}

// The work runs on a stream of the backend's; wait() has the current one wait for it.
template <class Call>
void TorchDeviceTransport::queue(const char* what, Call&& call) {
  std::string error;
  try {
    call()->wait();
    return;
  } catch (const c10::Error& thrown) {
    error = thrown.what_without_backtrace();
  } catch (const std::exception& thrown) {
    error = thrown.what();
  }
  throw Error(ErrorKind::Aborted, backend_->getBackendName() + " can't queue " + what + ": " +
                                      error.substr(0, std::min<size_t>(error.find('\n'), 300)));
}

}  // namespace syncengine
