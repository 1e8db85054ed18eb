// The address that a rank gives the others so that they can reach it: opaque bytes, which travel through the launcher's
// exchange.
//
// The bytes hold a random key of the rank. Whoever reads the exchange has the key, so by itself it stops accidents
// (jobs that meet on a port), not attackers: that takes a secret that does not travel (secret.h).
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "transport/matching/frame.h"

namespace syncengine::tcp {

// IPv4 and IPv6 addresses, and the choice of the one to listen on.
//
// Thread-safety: pure, but for local_interfaces(). Failure: throws InvalidUsage, naming what there is.

struct Ip {
  bool v6 = false;
  std::array<uint8_t, 16> bytes{};  // the first 4 for IPv4

  bool is_loopback() const;
  bool is_link_local() const;  // valid on one link only
  std::string text() const;
  bool operator==(const Ip&) const = default;
};

struct SocketAddress {
  union {
    sockaddr_in6 v6{};
    sockaddr_in v4;
    sockaddr any;
  };
  socklen_t length = sizeof(v6);
  const sockaddr* get() const { return &any; }
};
SocketAddress socket_address(const Ip& ip, uint16_t port);

// "10.0.0.1:5000", "[::1]:5000"
std::string text(const Ip& ip, uint16_t port);

struct Interface {
  std::string name;
  Ip ip;
};

// The interfaces of this machine that are up, as the kernel lists them.
std::vector<Interface> local_interfaces();

// Chooses by `wanted`, in the syntax of NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME: "" is loopback; "eth,ib" are
// interfaces whose names begin so, an exact name first; "=eth0" is exactly that one; "^docker,lo" and "^=eth0" are all
// but those. Or `wanted` is one of this machine's addresses. Earlier names win; then IPv4 before IPv6.
Ip choose_ip(const std::string& wanted, const std::vector<Interface>& interfaces);

using namespace matching;  // frames and what is under way: the same for all transports
using matching::encode;

inline constexpr int kMaxSockets = 16;

struct Address {
  Ip ip;
  uint16_t port = 0;
  bool has_secret = false;
  std::string network;  // 32 bytes, equal on two ranks that share a loopback interface
  std::string key;      // 32 random bytes

  bool operator==(const Address&) const = default;
};

std::string encode(const Address& address);

// Throws InvalidUsage if the bytes that rank `peer` gave are no address.
Address decode_address(int peer, const std::string& bytes);

// Throws InvalidUsage if only one of two ranks (`own_rank` and `peer`) has a secret, or if their addresses can't reach
// each other. Settings that must be equal on all ranks have been compared before (syncengine/connect.py).
void check_fit(int own_rank, const Address& own, int peer, const Address& other);

std::string random_bytes(size_t count);

}  // namespace syncengine::tcp
