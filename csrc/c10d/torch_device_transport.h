// Moves bytes between devices by a c10d backend for CUDA tensors that has no other user: NCCL's.
//
// Ownership: keeps the backend. Thread-safety and failure: as DeviceTransport; the GIL is not needed.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>

#include "transport/device_transport.h"

namespace syncengine {

class TorchDeviceTransport final : public DeviceTransport {
 public:
  TorchDeviceTransport(c10::intrusive_ptr<::c10d::Backend> backend, int device);
  ~TorchDeviceTransport() override { abort(); }

  void connect() override;
  void all_to_all(std::byte* to, const std::byte* from, size_t bytes) override;
  void all_gather(std::byte* to, const std::byte* from, size_t bytes) override;
  void broadcast(std::byte* memory, size_t bytes, int root) override;
  void abort() override;
  void close() override;

 private:
  at::Tensor tensor(const std::byte* memory, size_t bytes) const;
  template <class Call>
  void queue(const char* what, Call&& call);

  c10::intrusive_ptr<::c10d::Backend> backend_;
  c10::Device device_;
  std::atomic<bool> aborted_{false};
};

}  // namespace syncengine
