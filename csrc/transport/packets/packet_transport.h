// What moves packets between ranks for the endpoint: MPI, a torch process group, a test's memory. It knows nothing of
// what is in them.
//
// Order: the n-th packet sent to a rank goes into the n-th receive that this rank posted for the sender, and both give
// its size as the same. Ownership: a packet's memory is the endpoint's; until the packet has ended it stays where it
// is, if need be for ever. Thread-safety: one thread calls all of it; `wake` may be called from any. Failure: in the
// packet's End; nothing throws. What is posted for a peer after a packet of its has failed ends the same way, or never.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace syncengine::packets {

class PacketTransport {
 public:
  struct Packet {
    uint64_t id;
    int peer;  // rank of the job
    bool outgoing;
    std::byte* data;
    size_t bytes;  // never 0
  };
  struct End {
    uint64_t id;
    std::string error;  // "": it has arrived, or left the memory
  };

  virtual ~PacketTransport() = default;

  // First of all. False: it does not call `wake` when a packet has ended, so that step() has to be called again and
  // again.
  virtual bool start(std::function<void()> wake) = 0;

  // Posts these, and says which of all packets have ended since. Never blocks.
  virtual std::vector<End> step(const std::vector<Packet>& posts) = 0;

  // Last of all, on all ranks. `in_order`: no packet is under way, here or there.
  virtual void close(bool in_order) = 0;
};

}  // namespace syncengine::packets
