// Packets between hosts through a torch process group that sends and receives CPU tensors: Gloo's, or another's.
//
// One thread waits for works for each direction to each peer: c10d has no test for completion that all backends support
// (Gloo's works are complete only once a thread has waited). The GIL is not needed. Ownership: keeps the group;
// `closed` is called last of all, on the thread that calls close(). Everything else is as in packets::PacketTransport.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "transport/packets/packets.h"

namespace syncengine {

class TorchPacketTransport final : public packets::PacketTransport {
 public:
  // `ranks` gives, for each rank of the new communicator, its rank in the group. Nobody else uses `tag` there.
  TorchPacketTransport(c10::intrusive_ptr<::c10d::ProcessGroup> group, std::vector<int> ranks, int tag,
                       std::function<void()> closed);
  ~TorchPacketTransport() override;

  bool start(std::function<void()> wake) override;
  std::vector<End> step(const std::vector<Packet>& posts) override;
  void close(bool in_order) override;

 private:
  struct Ends;
  class Direction;

  c10::intrusive_ptr<::c10d::ProcessGroup> group_;
  std::vector<int> ranks_;
  int tag_;
  std::function<void()> closed_;
  std::shared_ptr<Ends> ends_;
  std::map<std::pair<int, bool>, std::shared_ptr<Direction>> directions_;
};

}  // namespace syncengine
