// CUDA's language for kernels.cu, compiled as C++ for the software device: this file is included in front of it.
#pragma once

#include <algorithm>
#include <cstring>

#include "machine.h"

#define __launch_bounds__(...)

namespace software {

// Of the thread that runs.
struct Place {
  dim3 grid, block, thread;
};
Place& here();

// Ends when all threads of the block are here; true if any has said so.
bool barrier(bool vote);
// Lets the block's other threads run.
void pause();

}  // namespace software

#define gridDim (::software::here().grid)
#define blockIdx (::software::here().block)
#define threadIdx (::software::here().thread)

using std::max;
using std::min;
inline void __syncthreads() { software::barrier(false); }
inline int __syncthreads_or(int vote) { return software::barrier(vote != 0); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __nanosleep(unsigned) { software::pause(); }

template <class Args>
cudaError_t cudaLaunchKernel(void (*kernel)(Args), dim3 grid, dim3 block, void** arguments, size_t shared,
                             cudaStream_t handle) {
  const auto stream = software::stream_of(handle);
  const int device = software::current_device();
  if (!stream || software::device_of(*stream) != device) return software::fail(cudaErrorInvalidResourceHandle);
  const size_t threads = size_t{block.x} * block.y * block.z;
  if (!kernel || threads == 0 || threads > 1024 || size_t{grid.x} * grid.y * grid.z == 0 || grid.y > 65535 ||
      shared != 0)
    return software::fail(cudaErrorInvalidConfiguration);
  Args args = *static_cast<Args*>(arguments[0]);
  software::enqueue(stream, [=] {
    for (size_t at = 0; at + 8 <= sizeof(args); at += 8) {
      uint64_t word;
      std::memcpy(&word, reinterpret_cast<const char*>(&args) + at, sizeof(word));
      software::check_argument(word, device);
    }
    software::run_grid(grid, block, [&] { kernel(args); });
  });
  return cudaSuccess;
}

inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  *attributes = {};
  return kernel ? cudaSuccess : software::fail(cudaErrorInvalidValue);
}
