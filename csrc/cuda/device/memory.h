// Device memory that other ranks may reach, and host memory that the device reaches.
//
// Ownership: each class gives back what it took. Exported memory must outlive the peers' mappings of it: it is freed
// only if they have said that they are done (group.cpp), else it stays to the end of the process.
// Thread-safety: one thread at a time, any thread; device() is made current by the caller.
// Failure: InvalidUsage with CUDA's own words.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <optional>

namespace syncengine::cuda {

// Makes `device` current while it lives.
class UseDevice {
 public:
  explicit UseDevice(int device);
  ~UseDevice();

 private:
  int before_ = -1;
};

// cudaMalloc. Memory that peers may have open is not freed: that would be undefined.
class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  void share() { shared_ = true; }     // before peers hear of it
  void unshare() { shared_ = false; }  // all peers have closed it

 private:
  std::byte* data_ = nullptr;
  size_t bytes_;
  bool shared_ = false;
};

// `memory`, of this device, until the pointer is dropped; on any thread.
std::shared_ptr<void> hold(std::unique_ptr<DeviceMemory> memory, int device);

// Makes host memory pinned, and reachable by the device.
class PinnedMapping {
 public:
  PinnedMapping(void* host, size_t bytes);
  ~PinnedMapping();
  PinnedMapping(const PinnedMapping&) = delete;
  std::byte* on_device() const { return device_; }

 private:
  void* host_;
  std::byte* device_ = nullptr;
};

// Pinned memory of this process alone.
class PinnedMemory {
 public:
  explicit PinnedMemory(size_t bytes);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  std::byte* data() const { return data_; }  // for the host, and for copies
  std::byte* on_device() const { return pinned_->on_device(); }

 private:
  size_t bytes_;
  std::byte* data_;
  std::optional<PinnedMapping> pinned_;
};

}  // namespace syncengine::cuda
