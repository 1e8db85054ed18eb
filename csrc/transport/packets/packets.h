// Data between hosts by whatever moves packets in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/texts.h"
#include "transport/interhost.h"
#include "transport/matching/heartbeat_monitor.h"

namespace syncengine::packets {

// What moves packets between ranks for the endpoint: MPI, a torch process group, a test's memory. It knows nothing of
// what is in them.
//
// Order: the n-th packet sent to a rank goes into the n-th receive that this rank posted for the sender, and both give
// its size as the same. Ownership: a packet's memory is the endpoint's; until the packet has ended it stays where it
// is, if need be for ever. Thread-safety: one thread calls all of it; `wake` may be called from any. Failure: in the
// packet's End; nothing throws. What is posted for a peer after a packet of its has failed ends the same way, or never.

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

struct Options {
  std::string by = "";      // for messages: who moves the packets
  bool checksum = false;    // CRC-32C of all data; the same on all ranks
  double heartbeat = 0.25;  // seconds
  double silence = 0;       // seconds without a sign of life after which a peer is lost; 0: never, and no heartbeats
  RankNames names = {};     // of the ranks of the job
};

inline matching::HeartbeatTiming heartbeat_timing(const Options& options) {
  return {.heartbeat = options.heartbeat, .silence = options.silence};
}

// `peers` are the ranks of the job on other hosts. Then run() must follow soon: nothing moves before.
std::unique_ptr<Interhost> connect(std::unique_ptr<PacketTransport> transport, const Options& options, int rank,
                                   const std::vector<int>& peers);

}  // namespace syncengine::packets
