// TCP passes the suite of all transports between hosts, in its variants.
#include <barrier>

#include "interhost_conformance.h"
#include "transport/tcp/tcp.h"

namespace syncengine::testing {

namespace {

Endpoints over_tcp(int size, tcp::Options options) {
  options.silence = 20;  // sanitizers and busy machines
  std::vector<tcp::Listener> listeners;
  std::vector<std::string> addresses;
  for (int rank = 0; rank < size; ++rank) {
    listeners.emplace_back(options);
    addresses.push_back(listeners.back().address());
  }
  Endpoints endpoints(size);
  run_ranks(size, [&](int rank) {
    endpoints[rank] = tcp::connect(std::move(listeners[rank]), rank, addresses, Deadline::after(seconds(20)));
  });
  return endpoints;
}

Endpoints plain(int size) { return over_tcp(size, {}); }
Endpoints one_socket(int size) { return over_tcp(size, {.sockets = 1}); }
Endpoints checked(int size) { return over_tcp(size, {.sockets = 3, .checksum = true, .secret = "sixteen letters!"}); }

}  // namespace

INTERHOST_CONFORMANCE(tcp, plain)
INTERHOST_CONFORMANCE(tcp_one_socket, one_socket)
INTERHOST_CONFORMANCE(tcp_checked, checked)

// As many as a large job has on one rank, and all at once.
TEST(tcp_sixteen_ranks) {
  constexpr int kRanks = 16;
  Cluster hosts(one_socket, kRanks);
  run_ranks(kRanks, [&](int rank) {
    std::vector<Bytes> in(kRanks, Bytes(40000));
    std::vector<Transfer> transfers;
    Bytes out = pattern(40000, rank);
    for (int peer = 0; peer < kRanks; ++peer) {
      if (peer == rank) continue;
      transfers.push_back(hosts[rank]->receive(peer, 1, in[peer].data(), in[peer].size()));
      transfers.push_back(hosts[rank]->send(peer, 1, out.data(), out.size()));
    }
    for (auto& transfer : transfers) hosts[rank].wait_done(transfer);
    for (int peer = 0; peer < kRanks; ++peer) {
      if (peer != rank) CHECK(same(in[peer], pattern(40000, peer)));
    }
  });
}

}  // namespace syncengine::testing
