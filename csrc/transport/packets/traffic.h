// The packets under way, and their memory.
//
// Ownership: owns the memory; what is under way when it goes is kept for ever, since the transport may still touch it.
// Thread-safety: under the endpoint's progress lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "transport/matching/frame.h"
#include "transport/packets/packet_transport.h"

namespace syncengine::packets {

inline constexpr size_t kControlBytes = 2 << 10;  // of a packet of frames: MPI sends that much without asking
inline constexpr size_t kMostBytes = matching::kChunkBytes;

class Buffer {
 public:
  std::byte* data() const { return memory_.get(); }

 private:
  friend class Traffic;
  std::unique_ptr<std::byte[]> memory_;
  bool large_ = false;
};

class Traffic {
 public:
  struct InFlight {
    int peer;
    Buffer buffer;
  };

  Traffic() = default;
  Traffic(const Traffic&) = delete;
  ~Traffic();

  Buffer take(size_t bytes);
  void give_back(Buffer buffer);

  // Returns the packet's number.
  uint64_t post(int peer, bool outgoing, Buffer buffer, size_t bytes);
  std::vector<PacketTransport::Packet> posted() { return std::exchange(posts_, {}); }

  InFlight end(uint64_t id);
  bool empty() const { return in_flight_.empty(); }

 private:
  uint64_t last_ = 0;
  std::vector<PacketTransport::Packet> posts_;
  std::unordered_map<uint64_t, InFlight> in_flight_;
  std::vector<Buffer> spare_;  // large ones
};

}  // namespace syncengine::packets
