// A DeviceGroup of ranks on several hosts: tensors go through pinned memory to the CPU's engine, and back.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "cuda/device/base_group.h"
#include "cuda/pieces.h"
#include "cuda/proxy.h"

namespace syncengine::cuda {

class ProxyGroup final : public BaseGroup {
 public:
  ProxyGroup(std::shared_ptr<Communicator> communicator, int device, const std::function<void()>& interrupted);
  ~ProxyGroup() override { close(); }

 private:
  struct Slots;

  const char* enqueue(const Operation& operation, cudaStream_t stream) override;
  void release() override;
  void download(const Operation& operation, const Piece& piece, size_t slot, cudaStream_t stream);
  void upload(const Operation& operation, const Piece& piece, size_t slot, cudaStream_t stream);

  std::shared_ptr<Slots> slots_;
  std::shared_ptr<Proxy> proxy_;
  cudaEvent_t last_ = nullptr;  // the end of what was queued so far
};

}  // namespace syncengine::cuda
