// A rank on another host, reached by packets.
//
// Each direction is one sequence: packets of frames, of kControlBytes, each followed by the payloads that its frames
// announce, as packets of their own. So every receive can be posted before its packet comes, with the right size. All
// data passes through the endpoint's own memory: callers have theirs back at once, and a transport that can't be
// stopped touches none of it.
//
// Both sides end with a Goodbye, their last packet: after both nothing is under way.
//
// Thread-safety: under the endpoint's progress lock. Failure: throws the Error that ends the peer; the endpoint then
// calls fail(), after which only the Goodbyes matter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "transport/matching/frame.h"
#include "transport/matching/session.h"
#include "transport/packets/packets.h"

namespace syncengine::packets {

// The packets under way, and their memory.
//
// Ownership: owns the memory. When it is destroyed, memory of packets still under way is kept for ever, since the
// transport may still touch it. Thread-safety: under the endpoint's progress lock.

inline constexpr size_t kControlBytes = 2 << 10;  // size of a packet of frames: MPI sends that much eagerly

using Buffer = std::unique_ptr<std::byte[]>;

class PacketTraffic {
 public:
  struct PostedPacket {
    int peer;
    Buffer buffer;
  };

  PacketTraffic() = default;
  PacketTraffic(const PacketTraffic&) = delete;
  ~PacketTraffic();

  // Posts a packet and returns its number.
  uint64_t post(int peer, bool outgoing, Buffer buffer, size_t bytes);
  std::vector<PacketTransport::Packet> posted() { return std::exchange(posts_, {}); }

  PostedPacket end(uint64_t id);
  bool empty() const { return in_flight_.empty(); }

 private:
  uint64_t last_ = 0;
  std::vector<PacketTransport::Packet> posts_;
  std::unordered_map<uint64_t, PostedPacket> in_flight_;
};

class Peer {
 public:
  Peer(matching::Shared& shared, PacketTraffic& traffic, const Options& options, int rank);

  matching::Session& session() { return session_; }
  void withdraw(uint64_t first, uint64_t last, const Error& error) { session_.withdraw(first, last, error); }

  // Posts packets for what is to be sent to this peer, while at most kMostOutgoing of them are under way.
  void step();
  // Handles the end of a packet to or from this peer: it has left its memory, has arrived, or has failed by `error`.
  void on_end(uint64_t id, Buffer buffer, const std::string& error);

  void beat();                            // says that this rank is alive
  void look_at_clock(Clock::time_point);  // checks whether the peer is
  void fail(const Error& error);
  // Leaves the peer in order: what is under way is sent, then the Goodbye.
  void take_leave(const Error& error) { session_.take_leave(error); }
  bool gone() const;  // nothing is under way, and nothing will be

 private:
  // A posted receive; they are kept in the order of posting.
  struct PostedReceive {
    uint64_t id;
    std::optional<matching::Arrival> arrival = {};  // none: a packet of frames
    bool ended = false;
    Buffer buffer = {};
  };

  void receive(size_t bytes, std::optional<matching::Arrival> arrival);
  void on_frames(const std::byte* packet);
  std::optional<matching::Frame> next_frame(std::string& payload);
  void on_frame(const matching::Frame& frame, const std::string& payload);
  void take_data(matching::Arrival& arrival, const std::byte* payload);
  void send_packet();
  void send(Buffer buffer, size_t bytes);
  [[noreturn]] void throw_out_of_step();

  matching::Session session_;
  PacketTraffic& traffic_;
  const Options& options_;
  size_t outgoing_ = 0;  // packets under way
  std::deque<PostedReceive> incoming_;
  std::string in_;     // the beginning of a frame that is not whole yet
  int announced_ = 0;  // payloads announced by the packet of frames that is being read
};

}  // namespace syncengine::packets
