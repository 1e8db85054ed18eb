// Collectives on CUDA tensors: torch's streams and events around cuda::DeviceGroup. Uses c10's device-generic classes
// alone, so that it compiles against every torch.
//
// Ownership: a communicator's devices live until close_devices(), and keep it alive. Thread-safety: with or without
// the GIL as said at each. Failure: InvalidUsage where there is no CUDA; the communicator's error.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <vector>

#include "base/error.h"
#include "engine/communicator/communicator.h"
#include "reducer/torch/python_error.h"

namespace syncengine {

// The error that `call` throws, as Python knows it, or None. With the GIL.
template <class Call>
pybind11::object exception_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return to_python(error);
  }
  return pybind11::none();
}

// What Python holds of an asynchronous collective, on CPU or CUDA tensors.
class PyWork {
 public:
  virtual ~PyWork() = default;
  virtual void wait(std::optional<double> timeout) = 0;
  virtual bool is_completed() const = 0;
  virtual pybind11::object exception() const = 0;
};

// Queues `operation`, whose memory is that of `from` and `to`, behind what the current stream of their device has. Then
// the result in `result`, if that is defined, is copied to `target`. With the GIL. Null unless `async_op`: the current
// stream waits for it. The first call for a device is collective, and waits for the other ranks.
std::unique_ptr<PyWork> run_on_device(const std::shared_ptr<Communicator>& communicator, Operation operation,
                                      const at::Tensor& from, const at::Tensor& to, const at::Tensor& target,
                                      const at::Tensor& result, bool async_op);

// A tensor in device memory that all peers reach. With the GIL. Collective.
at::Tensor empty_on_device(const std::shared_ptr<Communicator>& communicator, const std::vector<int64_t>& sizes,
                           size_t bytes, at::ScalarType type, c10::Device device);

}  // namespace syncengine
