#include "transport/tcp/tcp.h"

#include "transport/tcp/descriptors.h"
#include "transport/tcp/endpoint.h"
#include "transport/tcp/rendezvous.h"
#include "transport/tcp/socket.h"

namespace syncengine::tcp {

namespace {

constexpr size_t kOwn = 3;  // the listener, and what the endpoint waits on

void require_room(const Options& options, int peers) {
  if (peers == 0) return;
  require_descriptors(static_cast<size_t>(peers) * (1 + options.sockets) + kOwn,
                      "connections to " + std::to_string(peers) + " ranks of other hosts, " +
                          std::to_string(1 + options.sockets) + " each");
}

}  // namespace

Listener::Listener(const Options& options) : options_(options) {
  if (options.sockets < 1 || options.sockets > kMaxSockets) {
    throw Error(ErrorKind::InvalidUsage, "there must be 1 to " + std::to_string(kMaxSockets) +
                                             " TCP sockets a peer, not " + std::to_string(options.sockets));
  }
  if (options.heartbeat <= 0 || options.silence < 3 * options.heartbeat) {
    throw Error(ErrorKind::InvalidUsage,
                "a silence of " + std::to_string(options.silence) + " s can't be told from heartbeats every " +
                    std::to_string(options.heartbeat) + " s: give at least three times as much");
  }
  require_room(options, options.peers);
  address_.ip = choose_ip(options.interface, local_interfaces());
  UniqueFd listener = listen_on(address_.ip);
  address_.port = port_of(listener);
  fd_ = ParentFd(std::move(listener));
  address_.sockets = static_cast<uint8_t>(options.sockets);
  address_.checksum = options.checksum;
  address_.has_secret = !options.secret.empty();
  address_.network = own_network();
  address_.key = random_bytes(address_.network.size());
}

std::unique_ptr<Interhost> connect(Listener listener, int rank, const std::vector<std::string>& addresses,
                                   Deadline deadline, const std::function<void()>& interrupted) {
  std::map<int, Address> peers;
  for (int peer = 0; peer < static_cast<int>(addresses.size()); ++peer) {
    if (peer == rank || addresses[peer].empty()) continue;
    const RankNames& names = listener.options_.names;
    peers[peer] = decode_address(names.global(peer), addresses[peer]);
    check_fit(names.global(rank), listener.address_, names.global(peer), peers[peer]);
  }
  require_room(listener.options_, static_cast<int>(peers.size()));
  Rendezvous rendezvous(listener.options_, rank, listener.address_, std::move(peers), listener.fd_.get());
  return std::make_unique<Endpoint>(listener.options_, rank, rendezvous.run(deadline, interrupted));
}

}  // namespace syncengine::tcp
