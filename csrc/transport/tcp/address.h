// What a rank tells the others so that they can reach it: opaque bytes, which travel through the launcher's exchange.
//
// They hold a random key of the rank. Whoever reads the exchange has it, so that by itself it stops accidents (jobs
// that meet on a port), not attackers: that takes a secret that does not travel (secret.h).
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "transport/matching/frame.h"

namespace syncengine::tcp {

// IPv4 and IPv6 addresses, and which of this machine's to listen on.
//
// Thread-safety: pure, but for local_interfaces(). Failure: throws InvalidUsage, naming what there is.

struct Ip {
  bool v6 = false;
  std::array<uint8_t, 16> bytes{};  // of IPv4 the first 4

  bool is_loopback() const;
  bool is_link_local() const;  // means something on one link only
  std::string text() const;
  bool operator==(const Ip&) const = default;
};

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};
SocketAddress socket_address(const Ip& ip, uint16_t port);

// "10.0.0.1:5000", "[::1]:5000"
std::string text(const Ip& ip, uint16_t port);

struct Interface {
  std::string name;
  Ip ip;
};

// Those that are up, as the kernel lists them.
std::vector<Interface> local_interfaces();

// `wanted` as in NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME: "" is loopback; "eth,ib" those whose names begin so, an
// exact name first; "=eth0" exactly that; "^docker,lo" and "^=eth0" any but those. Or one of this machine's addresses.
// Earlier names win; then IPv4 before IPv6.
Ip choose_ip(const std::string& wanted, const std::vector<Interface>& interfaces);

using namespace matching;  // frames and what is under way: the same for all transports
using matching::encode;

inline constexpr int kMaxSockets = 16;

struct Address {
  Ip ip;
  uint16_t port = 0;
  bool has_secret = false;
  std::string network;  // 32 bytes; the same on two ranks whose loopback is the same
  std::string key;      // 32 random bytes

  bool operator==(const Address&) const = default;
};

std::string encode(const Address& address);

// Throws InvalidUsage if rank `peer` gave something else.
Address decode_address(int peer, const std::string& bytes);

// Throws InvalidUsage if one of two ranks (`own_rank` and `peer`) alone has a secret, or if `peer` can't be reached
// under its address. Settings that must be the same have been compared before, with those of all transports.
void check_fit(int own_rank, const Address& own, int peer, const Address& other);

std::string random_bytes(size_t count);
std::string own_network();

}  // namespace syncengine::tcp
