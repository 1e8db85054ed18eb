// IPv4 and IPv6 addresses, and which of this machine's to listen on.
//
// Thread-safety: pure, but for local_interfaces(). Failure: throws InvalidUsage, naming what there is.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace syncengine::tcp {

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

}  // namespace syncengine::tcp
