#include "cuda/device/groups.h"

#include <algorithm>
#include <string>
#include <utility>

#include "cuda/device/driver.h"
#include "cuda/device/memory.h"
#include "cuda/shared_pages.h"

namespace syncengine::cuda {

void DeviceGroup::run(const Operation& operation, void* stream) {
  std::lock_guard lock(mutex_);
  require_open();
  require_supported(operation);
  const UseDevice use(device_);
  const char* way = enqueue(operation, static_cast<cudaStream_t>(stream));
  counters_[way] += operation.input.bytes();
}

std::shared_ptr<void> DeviceGroup::allocate(size_t bytes, const std::function<void()>&) {
  const UseDevice use(device_);
  std::shared_ptr<DeviceMemory> memory;
  tell_peers_if_it_fails(*communicator_, [&] { memory = std::make_shared<DeviceMemory>(std::max<size_t>(bytes, 1)); });
  return {memory, memory->data()};
}

Nonfinite DeviceGroup::words_for_nonfinite() {
  const UseDevice use(device_);
  const auto memory = std::make_shared<PinnedMemory>((communicator_->size() + 1) * sizeof(uint64_t));
  return {.words = {memory, reinterpret_cast<uint64_t*>(memory->data())},
          .on_device = reinterpret_cast<uint64_t*>(memory->on_device())};
}

void DeviceGroup::close() {
  std::lock_guard lock(mutex_);
  if (std::exchange(closed_, true)) return;
  const UseDevice use(device_);
  release();
}

void DeviceGroup::require_open() const {
  if (closed_) throw Error(ErrorKind::InvalidUsage, kClosed);
  throw_if_failed();
}

bool is_built() { return true; }

void require_device(int device) {
  driver();
  int count = 0;
  check(cudaGetDeviceCount(&count), "counting devices");
  if (device < 0 || device >= count)
    throw Error(ErrorKind::InvalidUsage,
                "CUDA: there is no device " + std::to_string(device) + ", only " + std::to_string(count));
}

std::shared_ptr<DeviceGroup> connect(std::shared_ptr<Communicator> communicator, int device,
                                     const std::function<void()>& interrupted) {
  require_device(device);
  if (communicator->spans_hosts()) return std::make_shared<ProxyGroup>(std::move(communicator), device, interrupted);
  if (communicator->size() > kMaxRanks)
    throw Error(ErrorKind::InvalidUsage, "CUDA: at most " + std::to_string(kMaxRanks) +
                                             " ranks a communicator on one host, not " +
                                             std::to_string(communicator->size()));
  return std::make_shared<PeerGroup>(std::move(communicator), device, interrupted);
}

bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status), "asking whether a stream is captured");
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace syncengine::cuda
