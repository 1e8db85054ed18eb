// Moves bytes between devices by a c10d backend for CUDA tensors that has no other user: NCCL's.
//
// Ownership: keeps the backend. Thread-safety and failure: as DeviceTransport; the GIL is not needed.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "transport/device_transport.h"
#include "transport/packets/packets.h"

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

// Packets between hosts through a torch process group that sends and receives CPU tensors: Gloo's, or another's.
//
// Works are waited for on one thread for each direction to each peer: c10d has no test for completion that all backends
// support (Gloo's works are complete only once a thread has waited). The GIL is not needed. Ownership: keeps the group;
// `closed` is called last of all, on the thread that calls close(). Else as packets::PacketTransport.

class TorchPacketTransport final : public packets::PacketTransport {
 public:
  // `ranks`: in the group, of each rank of the job. Nobody else uses `tag` there.
  TorchPacketTransport(c10::intrusive_ptr<::c10d::ProcessGroup> group, std::vector<int> ranks, int tag,
                       std::function<void()> closed);
  ~TorchPacketTransport() override;

  bool start(std::function<void()> wake) override;
  std::vector<End> step(const std::vector<Packet>& posts) override;
  void close(bool in_order) override;

 private:
  class Ends;
  class Lane;
  Lane& lane(int peer, bool outgoing);

  c10::intrusive_ptr<::c10d::ProcessGroup> group_;
  std::vector<int> ranks_;
  int tag_;
  std::function<void()> closed_;
  std::shared_ptr<Ends> ends_;
  std::map<std::pair<int, bool>, std::shared_ptr<Lane>> lanes_;
};

}  // namespace syncengine
