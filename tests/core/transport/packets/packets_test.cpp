// Packets pass the suite of all transports between hosts, whatever moves them. And: what is special about them.
#include <numeric>
#include <random>

#include "fake_packet_transport.h"
#include "interhost_conformance.h"
#include "transport/matching/frame.h"
#include "transport/packets/endpoint.h"
#include "transport/packets/packets.h"
#include "transport/packets/peer.h"

namespace syncengine::testing {

namespace {

using packets::PacketTransport;

std::unique_ptr<Interhost> endpoint(const std::shared_ptr<FakeWire>& wire, int rank, int size,
                                    const packets::Options& options = {}) {
  std::vector<int> peers(size);
  std::iota(peers.begin(), peers.end(), 0);
  std::erase(peers, rank);
  return std::make_unique<packets::Endpoint>(std::make_unique<FakePacketTransport>(wire, rank), options, rank, peers);
}

Endpoints over(const std::shared_ptr<FakeWire>& wire, int size, const packets::Options& options = {}) {
  Endpoints endpoints(size);
  for (int rank = 0; rank < size; ++rank) endpoints[rank] = endpoint(wire, rank, size, options);
  return endpoints;
}

Endpoints polled(int size) { return over(std::make_shared<FakeWire>(size, FakeWire::How{}), size); }
Endpoints calling(int size) {
  return over(std::make_shared<FakeWire>(size, FakeWire::How{.calls = true}), size, {.timing = {.silence = 20}});
}
Endpoints backwards(int size) {
  return over(std::make_shared<FakeWire>(size, FakeWire::How{.backwards = true}), size, {.checksum = true});
}

// A rank that sends whatever the test likes.
class Stranger {
 public:
  Stranger(std::shared_ptr<FakeWire> wire, int rank) : transport_(std::move(wire), rank) {}

  void send(int peer, const std::string& bytes, size_t size = packets::kControlBytes) {
    auto& memory = memory_.emplace_back(std::make_unique<std::byte[]>(size));
    std::memcpy(memory.get(), bytes.data(), std::min(bytes.size(), size));
    transport_.step({{++last_, peer, true, memory.get(), size}});
  }
  static std::string packet(const std::string& frames, size_t claimed) {
    auto used = static_cast<uint32_t>(claimed);
    return std::string(reinterpret_cast<const char*>(&used), sizeof(used)) + frames;
  }
  static std::string packet(const std::string& frames) { return packet(frames, frames.size()); }

 private:
  std::deque<std::unique_ptr<std::byte[]>> memory_;  // outlives what the transport has of it
  FakePacketTransport transport_;
  uint64_t last_ = 0;
};

}  // namespace

INTERHOST_CONFORMANCE(packets_polled, polled)
INTERHOST_CONFORMANCE(packets_calling, calling)
INTERHOST_CONFORMANCE(packets_backwards, backwards)
INTERHOST_CONFORMANCE_CASE(packets, polled, what_was_sent_before_a_goodbye_may_be_asked_for_after_it)

TEST(packets_whose_mover_fails_end_the_peer_alone) {
  auto wire = std::make_shared<FakeWire>(3, FakeWire::How{});
  Running one(endpoint(wire, 0, 3)), two(endpoint(wire, 1, 3)), three(endpoint(wire, 2, 3));
  two->tell(0, "last words");
  CHECK_EQ(one.wait_message().bytes, "last words");
  Bytes got(100);
  auto lost = one->receive(1, 1, got.data(), got.size());
  wire->cut(1);
  Error error = one.wait_failed(lost);
  CHECK(error.kind() == ErrorKind::PeerLost);
  CHECK(contains(error.what(), "rank 1") && contains(error.what(), "the cable was cut"));
  CHECK(one->failure(1) && !one->failure(2));
  check_transfer(three, 2, one, 0, 1, pattern(100, 1));
}

TEST(packets_leave_nothing_under_way_after_goodbyes) {
  auto wire = std::make_shared<FakeWire>(3, FakeWire::How{});
  {
    Running one(endpoint(wire, 0, 3)), two(endpoint(wire, 1, 3)), three(endpoint(wire, 2, 3));
    Bytes sent = pattern(1 << 20, 1), got(sent.size());
    auto send = one->send(1, 1, sent.data(), sent.size());
    two.wait_done(two->receive(0, 1, got.data(), got.size()));
    auto never = one->send(2, 2, sent.data(), sent.size());
    auto neither = three->receive(1, 3, got.data(), got.size());
    two.leave();
    three.leave();
    CHECK(contains(one.wait_failed(never).what(), "rank 2 has left"));
  }
  for (int rank = 0; rank < 3; ++rank) CHECK(wire->closed(rank) == true);
}

TEST(packets_leave_without_a_peer_that_does_not_answer) {
  auto wire = std::make_shared<FakeWire>(2, FakeWire::How{});
  Running one(endpoint(wire, 0, 2));
  auto before = Clock::now();
  one.leave();
  CHECK(wire->closed(0) == false);
  CHECK(Clock::now() - before < seconds(10));
}

// Rank 1 sends one heartbeat. Ranks 0 and 2 send them all the time, and nothing else.
TEST(packets_name_a_silent_peer) {
  auto wire = std::make_shared<FakeWire>(3, FakeWire::How{.calls = true});
  packets::Options options{.timing = {.heartbeat = 0.05, .silence = 3}};
  Running one(endpoint(wire, 0, 3, options)), three(endpoint(wire, 2, 3, options));
  Stranger silent(wire, 1);
  silent.send(0, Stranger::packet(matching::encode({.kind = matching::Kind::Heartbeat}, false)));
  CHECK(contains(one.wait_lost(1).what(), "rank 1 has been silent"));
  std::this_thread::sleep_for(std::chrono::milliseconds(750));
  CHECK(!one->failure(2) && !three->failure(0));
}

// A size that differs is told to the other side, and both still say goodbye.
TEST(packets_end_in_order_after_a_mismatch) {
  auto wire = std::make_shared<FakeWire>(2, FakeWire::How{});
  {
    Running one(endpoint(wire, 0, 2)), two(endpoint(wire, 1, 2));
    Bytes memory(1 << 20);
    auto receive = two->receive(0, 3, memory.data(), 900000);
    auto send = one->send(1, 3, memory.data(), 1000000);
    CHECK(one.wait_failed(send).kind() == ErrorKind::Mismatch);
    CHECK(contains(two.wait_failed(receive).what(),
                   "rank 0 closed its connection to rank 1: rank 0 sends 1000000 bytes where rank 1"));
  }
  for (int rank = 0; rank < 2; ++rank) CHECK(wire->closed(rank) == true);
}

TEST(packets_of_garbage_end_the_peer) {
  using matching::Kind;
  std::string chunk = matching::encode({.kind = Kind::Chunk, .payload = 1000, .handle = 77}, false);
  std::string unasked = chunk + chunk + chunk + chunk;
  for (const auto& packet :
       {std::string(100, 'x'), Stranger::packet("", packets::kControlBytes), Stranger::packet(chunk),
        Stranger::packet(unasked + chunk), Stranger::packet(std::string(40, '\0'))}) {
    auto wire = std::make_shared<FakeWire>(2, FakeWire::How{});
    Running one(endpoint(wire, 0, 2));
    Stranger stranger(wire, 1);
    stranger.send(0, packet);
    CHECK(contains(one.wait_lost(1).what(), "rank 1 sent "));
  }
}

// Frames that are nearly right, in packets of any length: an error or nothing, and no byte out of place.
TEST(packets_fuzz) {
  std::mt19937_64 random(7);
  using matching::Kind;
  for (int round = 0; round < 300 / kSlowdown; ++round) {
    auto wire = std::make_shared<FakeWire>(2, FakeWire::How{});
    Bytes memory(300000), unsent(300000);
    Running one(endpoint(wire, 0, 2));
    auto receive = one->receive(1, 1, memory.data(), memory.size());
    auto small = one->receive(1, 2, memory.data(), 100);
    auto send = one->send(1, 3, unsent.data(), unsent.size());
    Stranger stranger(wire, 1);
    for (int count = 0; count < 5; ++count) {
      std::string frames;
      for (int i = 0; i < 6; ++i) {
        matching::Frame frame{.kind = static_cast<Kind>(random() % 10)};
        if (random() % 2) frame.tag = 1 + random() % 4;
        if (random() % 2) frame.handle = 1 + random() % 2;
        if (random() % 3 == 0) frame.size = static_cast<uint32_t>(random() % 400000);
        if (random() % 2) frame.payload = static_cast<uint32_t>(random() % 1200);
        frames += matching::encode(frame, false);
        bool is_data = frame.kind == Kind::Eager || frame.kind == Kind::Chunk;
        if (!is_data || frame.payload <= 512) frames += std::string(frame.payload, 'p');
      }
      frames.resize(std::min<size_t>(frames.size(), packets::kControlBytes - 4));
      stranger.send(0, Stranger::packet(frames));
    }
    if (random() % 2) one->withdraw({1}, 1, 1, {ErrorKind::Aborted, "enough"});
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    wire->cut(1);
    one.wait_lost(1);
    for (auto& transfer : {receive, small, send}) one.wait_ended(transfer);
  }
}

}  // namespace syncengine::testing
