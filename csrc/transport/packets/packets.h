// Data between hosts by whatever moves packets in order.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/build_id.h"
#include "base/texts.h"
#include "transport/interhost.h"
#include "transport/matching/heartbeat_monitor.h"
#include "transport/packets/packet_transport.h"

namespace syncengine::packets {

struct Options {
  std::string by = "";      // for messages: who moves the packets
  bool checksum = false;    // CRC-32C of all data; the same on all ranks
  double heartbeat = 0.25;  // seconds
  double silence = 0;       // seconds without a sign of life after which a peer is lost; 0: never, and no heartbeats
  RankNames names = {};     // of the ranks of the job
  uint64_t build = build_id();  // another one is for tests
  // Interhost::open_device_transport(); empty: there is none.
  std::function<std::unique_ptr<DeviceTransport>(const std::vector<int>& ranks, int device, const std::string& name)>
      open_device_transport = {};
};

inline matching::HeartbeatTiming heartbeat_timing(const Options& options) {
  return {.heartbeat = options.heartbeat, .silence = options.silence};
}

// `peers` are the ranks of the job on other hosts. Then run() must follow soon: nothing moves before.
std::unique_ptr<Interhost> connect(std::unique_ptr<PacketTransport> transport, const Options& options, int rank,
                                   const std::vector<int>& peers);

}  // namespace syncengine::packets
