// Collectives on CUDA tensors: torch's streams and events around cuda::DeviceGroup. Uses c10's device-generic classes
// alone, so that it compiles against every torch.
//
// Ownership: a communicator's devices live until close_devices(), and keep it alive. Thread-safety: with or without
// the GIL as said at each. Failure: InvalidUsage where there is no CUDA; the communicator's error.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "bindings/work.h"
#include "engine/communicator/communicator.h"

namespace syncengine {

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
