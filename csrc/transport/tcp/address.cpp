#include "transport/tcp/address.h"

#include <sys/random.h>
#include <sys/stat.h>

#include <cerrno>
#include <fstream>

#include "base/build_id.h"
#include "base/error.h"
#include "transport/matching/codec.h"
#include "transport/matching/frame.h"
#include "transport/tcp/sha256.h"

namespace syncengine::tcp {

namespace {

constexpr uint32_t kAddressMagic = 0x61636e73;  // "snca"

[[noreturn]] void throw_differ(const char* what, const char* setting, int rank, int value, int peer, int other) {
  throw Error(ErrorKind::Mismatch, "rank " + std::to_string(rank) + " has " + what + " " + std::to_string(value) +
                                       ", rank " + std::to_string(peer) + " has " + std::to_string(other) +
                                       ": give all ranks the same " + setting);
}

}  // namespace

std::string encode(const Address& address) {
  std::string ip(address.ip.bytes.begin(), address.ip.bytes.end());
  return Writer()
      .u32(kAddressMagic)
      .u64(build_id())
      .u8(address.ip.v6)
      .bytes(ip)
      .u16(address.port)
      .u8(address.sockets)
      .u8(address.checksum)
      .u8(address.has_secret)
      .bytes(address.network)
      .bytes(address.key)
      .text();
}

Address decode_address(int peer, const std::string& bytes) {
  Reader reader(bytes);
  bool ours = reader.u32() == kAddressMagic;
  if (uint64_t build = reader.u64(); ours && !reader.is_past_end() && build != build_id())
    throw another_build(peer, build);
  Address address;
  uint8_t v6 = reader.u8();
  std::string ip = reader.bytes(address.ip.bytes.size());
  std::copy(ip.begin(), ip.end(), address.ip.bytes.begin());
  address.port = reader.u16();
  address.sockets = reader.u8();
  uint8_t checksum = reader.u8(), has_secret = reader.u8();
  address.network = reader.bytes(kDigestBytes);
  address.key = reader.bytes(kDigestBytes);
  if (!ours || !reader.whole() || (v6 | checksum | has_secret) > 1 || address.port == 0 || address.sockets < 1 ||
      address.sockets > kMaxSockets)
    throw Error(ErrorKind::InvalidUsage, "rank " + std::to_string(peer) + " gave no TCP address of syncengine's");
  address.ip.v6 = v6;
  address.checksum = checksum;
  address.has_secret = has_secret;
  return address;
}

void check_fit(int own_rank, const Address& own, int peer, const Address& other) {
  if (own.sockets != other.sockets)
    throw_differ("TCP sockets a peer:", "number", own_rank, own.sockets, peer, other.sockets);
  if (own.checksum != other.checksum)
    throw_differ("TCP checksum:", "setting", own_rank, own.checksum, peer, other.checksum);
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
  if (getrandom(bytes.data(), count, 0) != static_cast<ssize_t>(count)) throw_system_error("no random bytes", errno);
  return bytes;
}

std::string own_network() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  std::getline(file, boot);
  struct stat status{};
  uint64_t space = stat("/proc/self/ns/net", &status) == 0 ? status.st_ino : 0;
  return sha256(Writer().bytes("syncengine network").bytes(boot).u64(space).text());
}

}  // namespace syncengine::tcp
