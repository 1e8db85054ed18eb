#include "transport/tcp/address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>
#include <sstream>

#include "base/error.h"
#include "transport/tcp/secret.h"

namespace syncengine::tcp {

namespace {

constexpr uint32_t kAddressMagic = 0x61636e73;  // "snca"

std::optional<Ip> ip_of(const sockaddr* address) {
  Ip ip;
  if (address && address->sa_family == AF_INET) {
    std::memcpy(ip.bytes.data(), &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, 4);
    return ip;
  }
  if (address && address->sa_family == AF_INET6) {
    ip.v6 = true;
    std::memcpy(ip.bytes.data(), &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr, 16);
    return ip;
  }
  return {};
}

std::string list(const std::vector<Interface>& interfaces) {
  std::string text;
  for (const auto& [name, ip] : interfaces) text += (text.empty() ? "" : ", ") + name + " (" + ip.text() + ")";
  return text.empty() ? "none" : text;
}

// The argument `wanted` of choose_ip(), parsed: names of interfaces, and two flags that say how they are meant.
struct Selection {
  bool except = false;
  bool exactly = false;
  std::vector<std::string> names;

  explicit Selection(std::string wanted) {
    std::erase(wanted, ' ');
    if (wanted.starts_with('^')) except = true, wanted.erase(0, 1);
    if (wanted.starts_with('=')) exactly = true, wanted.erase(0, 1);
    std::istringstream stream(wanted);
    for (std::string name; std::getline(stream, name, ',');)
      if (!name.empty()) names.push_back(name);
  }

  // The rank of an interface: lower is better, nothing if the interface is not wanted.
  std::optional<int> rank(const Interface& interface) const {
    const bool is_loopback = interface.ip.is_loopback();
    if (except && is_loopback) return {};
    if (names.empty()) return is_loopback ? std::optional(0) : std::nullopt;
    std::optional<int> best;
    int count = static_cast<int>(names.size());
    for (int i = 0; i < count && !best; ++i) {
      if (interface.name == names[i] || interface.ip.text() == names[i])
        best = 2 * i;
      else if (!exactly && interface.name.starts_with(names[i]))
        best = 2 * i + 1;
    }
    if (!except) return best;
    return best ? std::nullopt : std::optional(0);
  }
};

}  // namespace

bool Ip::is_loopback() const {
  static constexpr std::array<uint8_t, 16> kOne6 = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
  return v6 ? bytes == kOne6 : bytes[0] == 127;
}

bool Ip::is_link_local() const {
  return v6 ? bytes[0] == 0xfe && (bytes[1] & 0xc0) == 0x80 : bytes[0] == 169 && bytes[1] == 254;
}

std::string Ip::text() const {
  char buffer[INET6_ADDRSTRLEN] = {};
  inet_ntop(v6 ? AF_INET6 : AF_INET, bytes.data(), buffer, sizeof(buffer));
  return buffer;
}

SocketAddress socket_address(const Ip& ip, uint16_t port) {
  SocketAddress address;
  if (ip.v6) {
    address.v6.sin6_family = AF_INET6;
    address.v6.sin6_port = htons(port);
    std::memcpy(&address.v6.sin6_addr, ip.bytes.data(), 16);
  } else {
    address.v4.sin_family = AF_INET;
    address.v4.sin_port = htons(port);
    std::memcpy(&address.v4.sin_addr, ip.bytes.data(), 4);
    address.length = sizeof(address.v4);
  }
  return address;
}

std::string text(const Ip& ip, uint16_t port) {
  return (ip.v6 ? "[" + ip.text() + "]" : ip.text()) + ":" + std::to_string(port);
}

std::vector<Interface> local_interfaces() {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) throw_system_error("can't list this machine's network interfaces", errno, "socket");
  std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(first, &freeifaddrs);
  std::vector<Interface> interfaces;
  for (const ifaddrs* each = first; each; each = each->ifa_next) {
    auto ip = ip_of(each->ifa_addr);
    if (ip && (each->ifa_flags & IFF_UP)) interfaces.push_back({each->ifa_name, *ip});
  }
  return interfaces;
}

Ip choose_ip(const std::string& wanted, const std::vector<Interface>& interfaces) {
  Selection selection(wanted);
  const Interface* best = nullptr;
  auto order = [&](const Interface& interface) {
    // An address that peers can't use without naming a link comes last; IPv4 comes before IPv6.
    return std::tuple(*selection.rank(interface), interface.ip.is_link_local(), interface.ip.v6);
  };
  for (const Interface& interface : interfaces) {
    if (selection.rank(interface) && (!best || order(interface) < order(*best))) best = &interface;
  }
  if (best && best->ip.v6 && best->ip.is_link_local()) best = nullptr;  // needs a scope, which differs between hosts
  if (!best) {
    throw Error(ErrorKind::InvalidUsage, (wanted.empty() ? std::string("there is no loopback interface")
                                                         : "no network interface matches '" + wanted + "'") +
                                             " with an address that other hosts can use; this machine has " +
                                             list(interfaces));
  }
  return best->ip;
}

std::string encode(const Address& address) {
  std::string ip(address.ip.bytes.begin(), address.ip.bytes.end());
  return Writer()
      .u32(kAddressMagic)
      .u8(address.ip.v6)
      .bytes(ip)
      .u16(address.port)
      .u8(address.has_secret)
      .bytes(address.network)
      .bytes(address.key)
      .text();
}

Address decode_address(int peer, const std::string& bytes) {
  Reader reader(bytes);
  bool ours = reader.u32() == kAddressMagic;
  Address address;
  uint8_t v6 = reader.u8();
  std::string ip = reader.bytes(address.ip.bytes.size());
  std::copy(ip.begin(), ip.end(), address.ip.bytes.begin());
  address.port = reader.u16();
  uint8_t has_secret = reader.u8();
  address.network = reader.bytes(kDigestBytes);
  address.key = reader.bytes(kDigestBytes);
  if (!ours || !reader.whole() || (v6 | has_secret) > 1 || address.port == 0)
    throw Error(ErrorKind::InvalidUsage, "rank " + std::to_string(peer) + " gave no TCP address of syncengine's");
  address.ip.v6 = v6;
  address.has_secret = has_secret;
  return address;
}

void check_fit(int own_rank, const Address& own, int peer, const Address& other) {
  if (own.has_secret != other.has_secret) {
    int without = own.has_secret ? peer : own_rank;
    throw Error(ErrorKind::InvalidUsage, "rank " + std::to_string(without) + " has no secret, rank " +
                                             std::to_string(own.has_secret ? own_rank : peer) +
                                             " has one: set SYNCENGINE_SECRET or SYNCENGINE_SECRET_FILE on all ranks");
  }
  if (own.network == other.network) return;
  for (auto [rank, ip] : {std::pair(own_rank, own.ip), std::pair(peer, other.ip)}) {
    if (ip.is_loopback())
      throw Error(ErrorKind::InvalidUsage,
                  "rank " + std::to_string(rank) + " listens on loopback (" + ip.text() +
                      "), which other hosts can't reach: name its network interface (SYNCENGINE_INTERFACE)");
  }
  if (own.ip.v6 != other.ip.v6)
    throw Error(ErrorKind::InvalidUsage, "rank " + std::to_string(own_rank) + " listens on " + own.ip.text() +
                                             ", rank " + std::to_string(peer) + " on " + other.ip.text() +
                                             ": choose interfaces with the same kind of address");
}

std::string random_bytes(size_t count) {
  std::string bytes(count, '\0');
  if (getrandom(bytes.data(), count, 0) != static_cast<ssize_t>(count))
    throw_system_error("can't get random bytes", errno, "getrandom");
  return bytes;
}

}  // namespace syncengine::tcp
