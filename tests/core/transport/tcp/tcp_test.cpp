// TCP passes the suite of all transports between hosts, in its variants.
#include "interhost_conformance.h"
#include "tcp_dial.h"

namespace syncengine::testing {

namespace {

Endpoints over_tcp(int size, tcp::Options options) {
  options.timing.silence = 20;  // sanitizers and busy machines
  Listeners ranks(size, options);
  Endpoints endpoints(size);
  run_ranks(size, [&](int rank) { endpoints[rank] = ranks.connect(rank); });
  return endpoints;
}

Endpoints plain(int size) { return over_tcp(size, {}); }
Endpoints one_socket(int size) { return over_tcp(size, {.sockets = 1}); }
Endpoints checked(int size) { return over_tcp(size, {.sockets = 3, .checksum = true, .secret = "sixteen letters!"}); }

}  // namespace

INTERHOST_CONFORMANCE(tcp, plain)
INTERHOST_CONFORMANCE(tcp_one_socket, one_socket)
INTERHOST_CONFORMANCE(tcp_checked, checked)
INTERHOST_CONFORMANCE_CASE(tcp, plain, what_was_sent_before_a_goodbye_may_be_asked_for_after_it)

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
      if (peer != rank) CHECK(in[peer] == pattern(40000, peer));
    }
  });
}

}  // namespace syncengine::testing
