// A DeviceGroup of ranks on several hosts: tensors go through pinned memory to the CPU's engine, and back.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/device/memory.h"
#include "cuda/device_group.h"
#include "cuda/pieces.h"
#include "cuda/proxy.h"

namespace syncengine::cuda {

class ProxyGroup final : public DeviceGroup {
 public:
  ProxyGroup(std::shared_ptr<Communicator> communicator, int device, const std::function<void()>& interrupted);
  ~ProxyGroup() override { close(); }

  int device() const override { return device_; }
  void run(const Operation& operation, void* stream) override;
  std::shared_ptr<void> allocate(size_t bytes, const std::function<void()>& interrupted) override;
  std::map<std::string, uint64_t> counters() const override;
  void close() override;

 private:
  struct Slots;

  void download(const Operation& operation, const Piece& piece, size_t slot, cudaStream_t stream);
  void upload(const Operation& operation, const Piece& piece, size_t slot, cudaStream_t stream);

  std::shared_ptr<Communicator> communicator_;
  const int device_;
  std::shared_ptr<Slots> slots_;
  std::shared_ptr<Proxy> proxy_;
  cudaEvent_t last_ = nullptr;  // the end of what was queued so far
  std::map<std::string, uint64_t> counters_;
  bool closed_ = false;
  mutable std::mutex mutex_;
};

}  // namespace syncengine::cuda
