// Packet transports of packets whose other end is in Python, and the endpoints on them.
#pragma once

#include <memory>

#include "transport/interhost.h"
#include "transport/packets/packets.h"

namespace syncengine {

// What Python hands to connect(). Used up by it.
struct PacketTransportHandle {
  std::unique_ptr<packets::PacketTransport> transport;
  packets::Options options;
};

// An endpoint that end_packet_transports() knows. `peers` as packets::connect has them.
std::unique_ptr<Interhost> connect_by(PacketTransportHandle& handle, int rank, const std::vector<int>& peers,
                                      RankNames names);

}  // namespace syncengine
