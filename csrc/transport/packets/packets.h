// The transport between hosts over MPI, a torch process group, or anything else that moves packets in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/texts.h"
#include "transport/matching/heartbeat_monitor.h"

namespace syncengine::packets {

// The interface to MPI, a torch process group or a test's memory. Moves packets between ranks, whatever is in them.
//
// Order: the n-th packet sent to a rank goes into the n-th receive that this rank posted for the sender, and both sides
// give the same size. Ownership: a packet's memory is the endpoint's, and stays where it is until the packet has ended,
// if need be for ever. Thread-safety: one thread makes all calls; any thread may call `wake`. Failure: in the packet's
// End; nothing throws. Packets that are posted for a peer after one of its packets has failed fail too, or never end.

class PacketTransport {
 public:
  struct Packet {
    uint64_t id;
    int peer;  // its rank in the new communicator
    bool outgoing;
    std::byte* data;
    size_t bytes;  // never 0
  };
  struct End {
    uint64_t id;
    std::string error;  // empty: the packet has arrived, or has left the memory
  };

  virtual ~PacketTransport() = default;

  // Called first. Returns false if it does not call `wake` when a packet has ended, so that step() has to be polled.
  virtual bool start(std::function<void()> wake) = 0;

  // Posts packets, and returns all packets that have ended since the last call. Never blocks.
  virtual std::vector<End> step(const std::vector<Packet>& posts) = 0;

  // Called last, on all ranks. `in_order` says that no packet is under way, on either side.
  virtual void close(bool in_order) = 0;
};

struct Options {
  std::string by = "";                                // for texts: who moves the packets
  bool checksum = false;                              // CRC-32C of all data; the same on all ranks
  matching::HeartbeatTiming timing = {.silence = 0};  // by default no heartbeats, and no peer is lost for its silence
  RankNames names = {};                               // of the ranks of the job
};

}  // namespace syncengine::packets
