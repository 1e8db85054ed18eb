#include "cuda/device/memory.h"

#include <sys/mman.h>

#include <cerrno>
#include <string>

#include "cuda/device/driver.h"

namespace syncengine::cuda {

UseDevice::UseDevice(int device) {
  int before = device;
  check(cudaGetDevice(&before), "asking for the current device");
  if (before == device) return;
  check(cudaSetDevice(device), "choosing a device");
  before_ = before;
}

UseDevice::~UseDevice() {
  if (before_ >= 0) cudaSetDevice(before_);
}

DeviceMemory::DeviceMemory(size_t bytes) : bytes_(bytes) {
  void* memory = nullptr;
  const cudaError_t status = cudaMalloc(&memory, bytes);
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    int device = -1;
    size_t free = 0, total = 0;
    cudaGetDevice(&device);
    cudaMemGetInfo(&free, &total);
    throw Error(ErrorKind::InvalidUsage, "CUDA: device " + std::to_string(device) + " has no memory for " +
                                             std::to_string(bytes) + " bytes (" + std::to_string(free) + " of " +
                                             std::to_string(total) +
                                             " are free; torch keeps what it has freed: torch.cuda.empty_cache())");
  }
  check(status, "taking device memory");
  data_ = static_cast<std::byte*>(memory);
}

DeviceMemory::~DeviceMemory() {
  if (data_ && !shared_) cudaFree(data_);
}

std::shared_ptr<void> hold(std::unique_ptr<DeviceMemory> memory, int device) {
  std::byte* data = memory->data();
  return {data, [memory = std::shared_ptr(std::move(memory)), device](void*) mutable {
            try {
              const UseDevice use(device);
              memory.reset();
            } catch (const Error&) {  // at exit CUDA may be gone, and the memory with it
              new auto(std::move(memory));
            }
          }};
}

PinnedMapping::PinnedMapping(void* host, size_t bytes) : host_(host) {
  check(cudaHostRegister(host, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable), "pinning shared memory");
  void* device = nullptr;
  const cudaError_t status = cudaHostGetDevicePointer(&device, host, 0);
  if (status != cudaSuccess) cudaHostUnregister(host_);
  check(status, "mapping shared memory to the device");
  device_ = static_cast<std::byte*>(device);
}

PinnedMapping::~PinnedMapping() { cudaHostUnregister(host_); }

PinnedMemory::PinnedMemory(size_t bytes) : bytes_(bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) throw_system_error("can't take " + std::to_string(bytes) + " bytes to be pinned", errno);
  data_ = static_cast<std::byte*>(data);
  try {
    pinned_.emplace(data, bytes);
  } catch (...) {
    munmap(data, bytes);
    throw;
  }
}

PinnedMemory::~PinnedMemory() {
  pinned_.reset();
  munmap(data_, bytes_);
}

}  // namespace syncengine::cuda
