// torch's side of the software device, for a torch without CUDA: what libtorch_cuda would register for the device type
// CUDA. Its streams and events are those of ../software, and a kernel of torch is a step of the current stream that
// runs the CPU's kernel on the same memory. So an order between streams that nobody asked for does not exist here
// either.
//
//   devices.cpp   devices, streams and events for c10's device-generic classes
//   memory.cpp    an allocator with the life of memory that torch's caching one gives it; what is freed is poisoned
//   kernels.cpp   all of ATen's operators, for dense and sparse tensors
//   gloo.cpp      Gloo for CUDA tensors, over the host
//   module.cpp    what torch.cuda calls in torch._C
//
// Ownership: everything lives until the process ends. Thread-safety: any thread. Failure: c10::Error, as by torch; what
// a device would meet later ends the process.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>
#include <cuda_runtime_api.h>

#include <functional>
#include <memory>

#include "../software/machine.h"

namespace software_torch {

inline constexpr c10::DeviceType kCuda = c10::DeviceType::CUDA;

// Throws what torch would.
void check(cudaError_t status, const char* what);

// ---- devices.cpp ----

int get_device();
int count_devices();  // 0 without a driver
class UseDevice {
 public:
  explicit UseDevice(int device);
  ~UseDevice();

 private:
  int before_ = 0;
};

c10::Stream stream_with(int64_t id, int64_t device);  // 0: the default one
c10::Stream current_stream(int device);               // of this thread; -1: of its device
void set_current_stream(c10::Stream stream);
// Round robin, as torch's: after 32 streams of a priority the first comes again.
c10::Stream stream_from_pool(int device, bool high_priority);
cudaStream_t handle_of(c10::Stream stream);
bool is_capturing(c10::Stream stream);
void enqueue(c10::Stream stream, software::Step step);
void synchronize(c10::Stream stream);

// ---- memory.cpp ----

c10::Allocator* allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
void record_stream(const c10::DataPtr& memory, c10::Stream stream);
// Gives what is cached and not in use back to the device.
void empty_cache();
// While that is so, memory belongs to a graph, and is never given to others.
void capture_memory(bool begins);

// ---- kernels.cpp ----

void resize_storage(const c10::Storage& storage, size_t bytes);

}  // namespace software_torch
