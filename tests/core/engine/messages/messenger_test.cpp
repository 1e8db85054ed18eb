// Messages between ranks as threads, on one host and over several: any size and order, matched by source and tag, and
// named errors when they can't come.
#include <atomic>
#include <span>

#include "hosts_job.h"
#include "job.h"

namespace syncengine {

using testing::contains;

namespace {

constexpr size_t kSizes[] = {0, 1, 992, 993, 100000, 700001, 3 << 20};

unsigned char byte_of(int source, int destination, uint64_t tag, size_t i) {
  return static_cast<unsigned char>(i * 31 + i / 251 + source * 7 + destination * 57 + tag * 101);
}

Message message(const char* what, int peer, uint64_t tag, void* data, size_t bytes) {
  return {.peer = peer,
          .tag = tag,
          .memory = {data, bytes},
          .source = std::make_shared<std::atomic<int>>(-1),
          .describe = [what] { return std::string(what); }};
}

void fill(std::span<unsigned char> data, int source, int destination, uint64_t tag) {
  for (size_t i = 0; i < data.size(); ++i) data[i] = byte_of(source, destination, tag, i);
}

void check(std::span<const unsigned char> data, int source, int destination, uint64_t tag) {
  for (size_t i = 0; i < data.size(); ++i)
    if (data[i] != byte_of(source, destination, tag, i)) CHECK_EQ(data[i], byte_of(source, destination, tag, i));
}

std::shared_ptr<Work> send(Communicator& c, int to, uint64_t tag, std::vector<unsigned char>& data) {
  return c.send(message("send()", to, tag, data.data(), data.size()));
}
std::shared_ptr<Work> receive(Communicator& c, int from, uint64_t tag, std::vector<unsigned char>& data) {
  return c.receive(message("receive()", from, tag, data.data(), data.size()));
}

// The body on ranks of one host, and with every other placement in `hosts`.
void run_placed(std::vector<std::string> hosts, const Options& options, const testing::HostsJob::Body& body) {
  hosts.emplace_back(hosts[0].size(), 'a');
  testing::run_on_each(hosts, options, body);
}

Operation barrier() { return {.collective = Collective::Barrier}; }

}  // namespace

TEST(messages_between_all_ranks_at_once) {
  for (std::string hosts : {"ab", "aba", "aabbbccd"}) {
    run_placed({hosts}, {}, [size = static_cast<int>(hosts.size())](int rank, Communicator& communicator) {
      for (bool in_arena : {false, true}) {
        for (size_t bytes : kSizes) {
          if (bytes > (size == 8 ? 200000 : size == 3 && testing::kSlowdown > 1 ? 1 << 20 : 4 << 20)) continue;
          std::vector<std::shared_ptr<Work>> works;
          std::vector<std::shared_ptr<void>> memory;
          std::vector<unsigned char*> received(size);
          auto allocate = [&] {
            memory.push_back(in_arena ? communicator.allocate(bytes)
                                      : std::shared_ptr<void>(new char[bytes + 1], std::default_delete<char[]>()));
            return static_cast<unsigned char*>(memory.back().get());
          };
          for (int peer = 0; peer < size; ++peer) {
            if (peer == rank) continue;
            received[peer] = allocate();
            works.push_back(communicator.receive(message("receive()", peer, 5, received[peer], bytes)));
            unsigned char* data = allocate();
            fill({data, bytes}, rank, peer, 5);
            works.push_back(communicator.send(message("send()", peer, 5, data, bytes)));
          }
          for (auto& work : works) communicator.wait(work);
          for (int peer = 0; peer < size; ++peer)
            if (peer != rank) check({received[peer], bytes}, peer, rank, 5);
        }
      }
    });
  }
}

TEST(messages_to_oneself_are_refused) {
  run_placed({"ab"}, {}, [](int rank, Communicator& communicator) {
    std::vector<unsigned char> data(3);
    for (bool sends : {true, false}) {
      const auto text = CHECK_THROWS(sends ? send(communicator, rank, 1, data) : receive(communicator, rank, 1, data),
                                     ErrorKind::InvalidUsage);
      CHECK(contains(text, "is not another one of 0..1; what a rank would send to itself, it can copy"));
    }
    communicator.run(barrier());
  });
}

TEST(messages_match_by_tag_in_order) {
  run_placed({"ab"}, {}, [](int rank, Communicator& communicator) {
    constexpr int kCount = 100;  // more than may be announced at once
    std::vector<std::vector<unsigned char>> data(2 * kCount);
    std::vector<std::shared_ptr<Work>> works;
    for (int i = 0; i < kCount; ++i)
      for (uint64_t tag : {1, 2}) {
        auto& buffer = data[2 * i + tag - 1];
        buffer.resize(i % 3 == 0 ? 5000 + i : 10 + i);
        if (rank == 0) fill(buffer, i, 0, tag);
        if (rank == 0) works.push_back(send(communicator, 1, tag, buffer));
      }
    if (rank == 0) communicator.run(barrier());  // nobody waits for a message yet
    if (rank == 1) {
      communicator.run(barrier());
      for (uint64_t tag : {2, 1})
        for (int i = 0; i < kCount; ++i) works.push_back(receive(communicator, 0, tag, data[2 * i + tag - 1]));
    }
    for (auto& work : works) communicator.wait(work);
    for (int i = 0; i < kCount; ++i)
      for (uint64_t tag : {1, 2}) check(data[2 * i + tag - 1], i, 0, tag);
  });
}

TEST(messages_of_any_source_say_whose_they_are) {
  run_placed({"aabb", "abcd"}, {}, [](int rank, Communicator& communicator) {
    for (size_t bytes : {size_t{8}, size_t{300000}}) {
      std::vector<unsigned char> data(bytes);
      communicator.run(barrier());
      if (rank != 0) {
        fill(data, rank, 0, 9);
        communicator.wait(send(communicator, 0, 9, data));
        continue;
      }
      int seen = 0;
      for (int i = 1; i < 4; ++i) {
        Message any = message("receive()", Message::kAnySource, 9, data.data(), bytes);
        auto source = any.source;
        communicator.wait(communicator.receive(any));
        check(data, *source, 0, 9);
        seen |= 1 << *source;
      }
      CHECK_EQ(seen, 0b1110);
    }
  });
}

TEST(messages_beside_collectives_and_in_split_groups) {
  run_placed({"aabb", "abba"}, {}, [](int rank, Communicator& communicator) {
    for (int round = 0; round < 3; ++round) {
      std::vector<unsigned char> out(600000), in(600000);
      fill(out, rank, round, 1);
      auto half = communicator.split(rank < 2 ? std::vector<int>{0, 1} : std::vector<int>{2, 3});
      auto received = receive(*half, 1 - half->rank(), 1, in), sent = send(*half, 1 - half->rank(), 1, out);
      float sum = 1;
      communicator.run(testing::all_reduce_of(&sum, sizeof(sum)));
      CHECK_EQ(sum, 4.0f);
      half->wait(received);
      half->wait(sent);
      check(in, rank ^ 1, round, 1);
    }
  });
}

TEST(messages_of_other_sizes_are_a_mismatch) {
  for (size_t bytes : {size_t{10}, size_t{5000}}) {
    run_placed({"ab"}, {}, [bytes](int rank, Communicator& communicator) {
      std::vector<unsigned char> data(bytes + static_cast<size_t>(rank));
      std::string text = CHECK_THROWS(
          [&] {
            if (rank == 0) communicator.wait(send(communicator, 1, 3, data));
            if (rank == 1) communicator.wait(receive(communicator, 0, 3, data));
            communicator.run(barrier());
          }(),
          ErrorKind::Mismatch);
      if (bytes == 10) return;
      CHECK(contains(text, "rank 1 called receive() for 5001 bytes where rank 0 sent 5000 bytes"));
    });
  }
}

TEST(a_message_that_does_not_come_times_out_and_names_the_source) {
  run_placed({"aba", "aab"}, {.timeout = seconds(0.3)}, [](int rank, Communicator& communicator) {
    if (rank == 2) return;
    std::vector<unsigned char> data(10);
    std::string text = CHECK_THROWS(communicator.wait(receive(communicator, 1 - rank, 3, data)), ErrorKind::Timeout);
    CHECK(contains(text, "waits for rank") && contains(text, "in receive()"));
  });
}

TEST(who_leaves_is_lost_to_those_that_wait_for_its_message_only) {
  for (size_t bytes : {10, 5 << 20}) {
    run_placed({"ab", "aab"}, {}, [bytes](int rank, Communicator& communicator) {
      std::vector<unsigned char> data(bytes);
      int last = communicator.size() - 1;
      if (rank == last) fill(data, last, 0, 1);
      if (rank == last) return communicator.wait(send(communicator, 0, 1, data));
      if (rank > 0) return;
      communicator.wait(receive(communicator, last, 1, data));
      check(data, last, 0, 1);
      std::string text = CHECK_THROWS(communicator.wait(receive(communicator, last, 2, data)), ErrorKind::PeerLost);
      CHECK(contains(text, "rank " + std::to_string(last) + " has left"));
    });
  }
}

TEST(a_message_of_any_source_is_not_awaited_of_ranks_that_have_all_left) {
  run_placed({"abc", "aab"}, {.timeout = seconds(10)}, [](int rank, Communicator& communicator) {
    for (size_t bytes : kSizes) {
      std::vector<unsigned char> data(bytes);
      if (rank > 0) {
        communicator.wait(send(communicator, 0, bytes, data));
        continue;
      }
      // The last ones also of ranks that have left.
      for (int i = 0; i < 2; ++i) communicator.wait(receive(communicator, Message::kAnySource, bytes, data));
    }
    if (rank > 0) return;
    std::vector<unsigned char> data(3);
    const auto text =
        CHECK_THROWS(communicator.wait(receive(communicator, Message::kAnySource, 7, data)), ErrorKind::PeerLost);
    CHECK(contains(text, "ranks 1, 2 have left (they exited or called syncengine.shutdown()) while rank 0 was in"));
  });
}

TEST(who_leaves_is_lost_to_those_that_send_it_what_it_does_not_take) {
  run_placed({"ab"}, {}, [](int rank, Communicator& communicator) {
    std::vector<unsigned char> first(100000), second(2 << 20), last(1);
    if (rank == 1) {
      communicator.wait(receive(communicator, 0, 1, first));
      return communicator.wait(receive(communicator, 0, 3, last));
    }
    auto dropped = send(communicator, 1, 2, second);
    communicator.wait(send(communicator, 1, 1, first));
    communicator.wait(send(communicator, 1, 3, last));
    std::string text = CHECK_THROWS(communicator.wait(dropped), ErrorKind::PeerLost);
    CHECK(contains(text, "rank 1 has left"));
  });
}

TEST(messages_of_a_dead_host_end_with_its_name) {
  testing::HostsJob job("ab");
  std::atomic<bool> waits = false;
  job.run([&](int rank, Communicator& communicator) {
    std::vector<unsigned char> out(20 << 20), in(20 << 20);
    auto sent = send(communicator, 1 - rank, 1, out);
    auto received = rank == 0 ? receive(communicator, 1, 2, in) : sent;
    if (rank == 0) waits = true;
    if (rank == 1) {
      while (!waits) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      job.network().cut(1);
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
      return;
    }
    for (const auto& work : {received, sent}) {
      std::string text = CHECK_THROWS(communicator.wait(work), ErrorKind::PeerLost);
      CHECK(contains(text, "rank 1 died"));
    }
  });
}

// However the memory is cut on each side: in another order, or so that its last byte lies where it would without a gap.
TEST(messages_from_and_into_pieces_of_memory) {
  struct Piece {
    size_t begin, bytes;
  };
  constexpr size_t kPart = 50000;
  const std::vector<Piece> whole{{0, 3 * kPart}}, apart{{0, kPart}, {3 * kPart, kPart}, {2 * kPart, kPart}};
  const std::vector<std::vector<Piece>> cases[] = {
      {{{500, 500}, {0, 500}}, {{333, 667}, {0, 333}}},
      {{{1250000, 1250001}, {0, 1250000}}, {{833333, 1666668}, {0, 833333}}},
      {apart, whole},
      {whole, apart}};
  run_placed({"ab"}, {}, [&](int rank, Communicator& communicator) {
    for (const auto& pieces : cases) {  // by rank
      std::vector<unsigned char> memory(2500001);
      Message mine = message("a piece", 1 - rank, 6, nullptr, 0);
      std::vector<size_t> places;  // of its bytes
      for (const Piece& piece : pieces[rank]) {
        mine.memory.add(memory.data() + piece.begin, piece.bytes);
        for (size_t i = 0; i < piece.bytes; ++i) places.push_back(piece.begin + i);
      }
      for (size_t i = 0; rank == 0 && i < places.size(); ++i) memory[places[i]] = byte_of(0, 1, 6, i);
      communicator.wait(rank == 0 ? communicator.send(mine) : communicator.receive(mine));
      for (size_t i = 0; i < places.size(); ++i)
        if (memory[places[i]] != byte_of(0, 1, 6, i)) CHECK_EQ(memory[places[i]], byte_of(0, 1, 6, i));
    }
  });
}

}  // namespace syncengine
