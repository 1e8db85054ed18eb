// What a rank tells the others so that they can reach it: opaque bytes, which travel through the launcher's exchange.
//
// They hold a random key of the rank. Whoever reads the exchange has it, so that by itself it stops accidents (jobs
// that meet on a port), not attackers: that takes a secret that does not travel (secret.h).
#pragma once

#include <cstdint>
#include <string>

#include "transport/matching/frame.h"
#include "transport/tcp/ip.h"

namespace syncengine::tcp {

using namespace matching;  // frames and what is under way: the same for all transports
using matching::encode;

inline constexpr int kMaxSockets = 16;

struct Address {
  Ip ip;
  uint16_t port = 0;
  uint8_t sockets = 0;    // data connections a peer
  bool checksum = false;  // of each frame's payload
  bool has_secret = false;
  std::string network;  // 32 bytes; the same on two ranks whose loopback is the same
  std::string key;      // 32 random bytes

  bool operator==(const Address&) const = default;
};

std::string encode(const Address& address);

// Throws Mismatch if rank `peer` runs another build, InvalidUsage if that is no address.
Address decode_address(int peer, const std::string& bytes);

// Throws Mismatch where two ranks (`own_rank` and `peer`) differ in what must be equal, and InvalidUsage if `peer`
// can't be reached under its address.
void check_fit(int own_rank, const Address& own, int peer, const Address& other);

std::string random_bytes(size_t count);
std::string own_network();

}  // namespace syncengine::tcp
