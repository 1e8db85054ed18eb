// What can go wrong between ranks that are connected: each is an error that names the rank, others go on, nothing is
// left.
#include <filesystem>
#include <thread>

#include "child.h"
#include "interhost_conformance.h"
#include "tcp_dial.h"

namespace syncengine::testing {

namespace {

using tcp::Frame;
using tcp::Kind;
using tcp::Options;

// Rank 0, which runs, with rank 1 played by the test and an honest rank 2.
struct Stage {
  Options options;
  std::unique_ptr<Running> zero, two;
  Actor actor;                        // ends first: rank 0 stays for a while where a rank that it has lost may live
  std::vector<UniqueFd> connections;  // of rank 1 to rank 0

  explicit Stage(Options given = {.sockets = 2, .timing = {.silence = 20}}) : options(given), actor(1, given) {
    tcp::Listener first(options), last(options);
    const std::string addresses[] = {first.address(), actor.address(), last.address()};
    auto run = [&](std::unique_ptr<Running>& end, tcp::Listener& listener, int rank, const std::string& one) {
      end = std::make_unique<Running>(
          tcp::connect(std::move(listener), rank, {addresses[0], one, addresses[2]}, Deadline::after(seconds(60))));
    };
    run_ranks(3, [&](int rank) {
      if (rank == 0) run(zero, first, 0, addresses[1]);
      if (rank == 1) connections = actor.join(0, addresses[0]);
      if (rank == 2) run(two, last, 2, "");  // ranks 1 and 2 don't know each other
    });
  }

  const UniqueFd& control() { return connections[0]; }
  const UniqueFd& data() { return connections[1]; }

  // Rank 0 finds rank 1 lost; ranks 0 and 2 go on.
  std::string lost() {
    std::byte byte{};
    Error error = zero->wait_failed((*zero)->receive(1, 77, &byte, 1));
    CHECK(error.kind() == ErrorKind::PeerLost);
    CHECK(contains(error.what(), "rank 1"));
    CHECK_EQ((*zero)->failure(1)->what(), std::string(error.what()));
    check_transfer(*zero, 0, *two, 2, 5, pattern(1 << 20, 4));
    return error.what();
  }
};

std::string frame(const Frame& frame, bool checksum = false) { return encode(frame, checksum); }

long count_of(const char* folder) { return std::distance(std::filesystem::directory_iterator(folder), {}); }

// Whether this process soon has no more threads. The kernel lists a thread for a moment after it was joined.
bool has_at_most_threads(long most) {
  const auto end = Clock::now() + seconds(60);
  while (count_of("/proc/self/task") > most) {
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace

TEST(tcp_garbage_on_any_connection_is_named) {
  for (size_t connection : {0, 1, 2}) {
    Stage stage;
    put(stage.connections[connection], std::string(100, 'g'));
    CHECK(contains(stage.lost(), "rank 1 sent something that is no frame"));
  }
}

TEST(tcp_data_that_nobody_asked_for_is_named) {
  Stage stage;
  put(stage.data(), frame({.kind = Kind::Chunk, .payload = 1, .handle = 1}) + "x");
  CHECK(contains(stage.lost(), "data that nobody asked for"));
}

TEST(tcp_more_than_the_credit_is_named) {
  Stage stage;
  std::string frames;
  for (uint64_t tag = 0; tag < 65; ++tag) {
    frames += frame({.kind = Kind::Eager, .payload = tcp::kEagerBytes, .tag = 1000 + tag});
    frames += std::string(tcp::kEagerBytes, 'x');
  }
  std::jthread writer([&] { (void)!send(stage.data().get(), frames.data(), frames.size(), MSG_NOSIGNAL); });
  std::string text = stage.lost();
  writer.join();
  CHECK(contains(text, "more than it has credit for"));
}

TEST(tcp_wrong_checksum_is_named) {
  for (bool honest : {true, false}) {
    Stage stage({.sockets = 2, .checksum = true, .timing = {.silence = 20}});
    std::byte place[3];
    auto receive = (*stage.zero)->receive(1, 8, place, 3);
    put(stage.data(),
        frame({.kind = Kind::Eager, .payload = 3, .checksum = honest ? 0x364b3fb7u : 1, .tag = 8}, true) + "abc");
    if (honest) {
      stage.zero->wait_done(receive);
      CHECK(std::memcmp(place, "abc", 3) == 0);
    } else {
      CHECK(contains(stage.zero->wait_failed(receive).what(), "checksum"));
      CHECK(contains(stage.lost(), "data whose checksum differs"));
    }
  }
}

TEST(tcp_end_without_goodbye_is_named) {
  for (size_t connection : {0, 1}) {
    Stage stage, other;
    stage.connections[connection].reset();
    CHECK(contains(stage.lost(), "rank 1 died, or the network to it broke"));
    reset(other.connections[connection]);
    CHECK(contains(other.lost(), "rank 1 died, or the network to it broke (Connection reset by peer)"));
  }
}

// In the middle of a transfer: what has come of it counts for nothing.
TEST(tcp_end_in_mid_transfer_is_named) {
  Stage stage;
  Bytes place(300000);
  auto receive = (*stage.zero)->receive(1, 8, place.data(), place.size());
  std::string ready;
  for (;;) {  // heartbeats come, too
    ready = get(stage.control(), tcp::kFrameBytes);
    auto header = tcp::decode(ready, tcp::Channel::Control, false);
    CHECK(header);
    if (header->kind == Kind::Ready) break;
  }
  put(stage.data(), frame({.kind = Kind::Chunk, .payload = tcp::kChunkBytes, .handle = 1}) + std::string(1000, 'x'));
  for (auto& fd : stage.connections) fd.reset();
  CHECK(contains(stage.zero->wait_failed(receive).what(), "rank 1 died"));
  stage.lost();
}

// Words and fault in one read: whoever sees the fault can hear the words.
TEST(tcp_last_words_come_before_a_fault) {
  for (int round = 0; round < 10; ++round) {
    Stage stage;
    put(stage.control(), frame({.kind = Kind::Message, .payload = 3}) + "bye" + std::string(100, 'g'));
    while (!(*stage.zero)->failure(1)) continue;
    auto heard = (*stage.zero)->hear();
    CHECK(heard && heard->bytes == "bye");
  }
}

// Rank 1 sends one heartbeat. Ranks 0 and 2 send them all the time, and nothing else.
TEST(tcp_silence_is_named_and_honest_ranks_are_never_silent) {
  Stage stage({.sockets = 2, .timing = {.heartbeat = 0.25, .silence = 3}});
  auto begin = Clock::now();
  put(stage.control(), frame({.kind = Kind::Heartbeat}));
  stage.zero->wait_lost(1);
  CHECK(Clock::now() - begin >= seconds(2.9));
  std::this_thread::sleep_for(std::chrono::milliseconds(750));
  CHECK(!(*stage.zero)->failure(2) && !(*stage.two)->failure(0));
  std::string text = stage.lost();
  CHECK(contains(text, "rank 1 has been silent for ") && contains(text, "a heartbeat is due every 0.25 s"));
}

// The other side learns why it was given up.
TEST(tcp_abort_comes_with_words) {
  Stage stage;
  std::string words = "rank 0 has sent garbage";
  put(stage.control(), frame({.kind = Kind::Abort, .payload = static_cast<uint32_t>(words.size()), .size = 0}) + words);
  CHECK(contains(stage.lost(), "rank 1 closed its connection to rank 0: rank 0 has sent garbage"));

  Stage other;
  put(other.data(), std::string(100, 'g'));
  other.lost();
  std::string heard = get(other.control(), 4096);  // until the end
  CHECK(contains(heard, "rank 1 sent something that is no frame"));
}

TEST(tcp_stop_does_not_wait_for_the_deaf) {
  Stage stage;
  auto begin = Clock::now();
  stage.zero->leave();
  CHECK(Clock::now() - begin < seconds(10));
  std::string heard;
  for (std::string next; !(next = get(stage.control(), tcp::kFrameBytes)).empty();) heard = next;
  CHECK(tcp::decode(heard, tcp::Channel::Control, false)->kind == Kind::Goodbye);
}

TEST(tcp_leaves_no_descriptor_and_starts_no_thread) {
  const long descriptors = count_of("/proc/self/fd"), threads = count_of("/proc/self/task");
  {
    Stage stage;
    CHECK(has_at_most_threads(threads + 2));  // the two that run
    reset(stage.connections[0]);
    stage.lost();
  }
  CHECK_EQ(count_of("/proc/self/fd"), descriptors);
  CHECK(has_at_most_threads(threads));
}

// A DataLoader worker does not keep its parent's connections open: who dies or gives up is seen to at once.
TEST(tcp_forked_child_keeps_no_connection) {
  Stage stage;
  IdleChild child;
  put(stage.data(), std::string(100, 'g'));
  stage.lost();
  bool closed = true;
  for (auto& connection : stage.connections) {
    get(connection, 1 << 16);  // up to the end, or in vain
    closed &= is_closed(connection);
  }
  child.end();
  CHECK(closed);
}

TEST(tcp_peers_that_are_none_are_refused) {
  Stage stage;
  std::byte byte{};
  for (int peer : {0, 3, -1}) {
    CHECK_THROWS((*stage.zero)->send(peer, 1, &byte, 1), ErrorKind::InvalidUsage);
    CHECK_THROWS((*stage.zero)->tell(peer, ""), ErrorKind::InvalidUsage);
  }
}

}  // namespace syncengine::testing
