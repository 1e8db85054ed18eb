// What every Interhost must do. An implementation registers with
//
//   INTERHOST_CONFORMANCE(name, make)
//
// where make(size) gives the connected endpoints of `size` hosts with one rank each, as std::vector of unique_ptr.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "interhost_running.h"
#include "test.h"
#include "transport/interhost.h"

namespace syncengine::testing::conformance {

// clang-format off
inline constexpr size_t kSizes[] = {
    0, 1, 3, 63, 64, 4095, 4096, 8192, 8193, 16383, 16384, 16385, 65536, 65537, (256 << 10) - 1, 256 << 10,
    (256 << 10) + 1, (512 << 10) + 13, (1 << 20) - 1, 1 << 20};
// clang-format on

// Both orders of posting, every size, into memory at an odd address; the bytes around it stay.
inline void moves_bytes_of_every_size(MakeEndpoints make) {
  Cluster hosts(make, 2);
  uint64_t tag = 0;
  for (bool receive_first : {true, false}) {
    for (size_t bytes : kSizes) {
      Bytes sent = pattern(bytes, ++tag), arena(bytes + 64, std::byte{0xa5});
      Transfer send, receive;
      auto post_receive = [&] { receive = hosts[1]->receive(0, tag, arena.data() + 33, bytes); };
      if (receive_first) post_receive();
      send = hosts[0]->send(1, tag, sent.data(), bytes);
      if (!receive_first) post_receive();
      hosts[1].wait_done(receive);
      hosts[0].wait_done(send);
      CHECK(std::equal(sent.begin(), sent.end(), arena.begin() + 33));
      auto untouched = [](std::byte byte) { return byte == std::byte{0xa5}; };
      CHECK(std::all_of(arena.begin(), arena.begin() + 33, untouched));
      CHECK(std::all_of(arena.end() - 31, arena.end(), untouched));
    }
  }
}

// All pairs of 4 hosts, both ways at once, tags posted in opposite orders.
inline void many_transfers_at_once(MakeEndpoints make) {
  constexpr int kHosts = 4, kTags = 24 / std::min(kSlowdown, 3);
  Cluster hosts(make, kHosts);
  auto size_of = [](int from, int to, int tag) { return kSizes[(from * 7 + to * 3 + tag) % std::size(kSizes)]; };
  auto data_of = [&](int from, int to, int tag) {
    return pattern(size_of(from, to, tag), (from * kHosts + to) * 1000 + tag);
  };
  run_ranks(kHosts, [&](int rank) {
    std::vector<std::pair<Bytes, Transfer>> sends, receives;
    std::vector<Bytes> wanted;
    for (int i = 0; i < kTags; ++i) {
      for (int peer = 0; peer < kHosts; ++peer) {
        if (peer == rank) continue;
        sends.push_back({data_of(rank, peer, i), nullptr});
        auto& [out, send] = sends.back();
        send = hosts[rank]->send(peer, i, out.data(), out.size());
        int other = kTags - 1 - i;
        wanted.push_back(data_of(peer, rank, other));
        receives.push_back({Bytes(wanted.back().size()), nullptr});
        auto& [in, receive] = receives.back();
        receive = hosts[rank]->receive(peer, other, in.data(), in.size());
      }
    }
    for (size_t i = 0; i < receives.size(); ++i) {
      hosts[rank].wait_done(receives[i].second);
      CHECK(receives[i].first == wanted[i]);
      hosts[rank].wait_done(sends[i].second);
    }
  });
}

inline void one_memory_to_several_peers(MakeEndpoints make) {
  Cluster hosts(make, 4);
  Bytes sent = pattern(700001, 5);
  std::vector<Transfer> sends;
  for (int peer = 1; peer < 4; ++peer) sends.push_back(hosts[0]->send(peer, 9, sent.data(), sent.size()));
  for (int peer = 1; peer < 4; ++peer) {
    Bytes got(sent.size());
    hosts[peer].wait_done(hosts[peer]->receive(0, 9, got.data(), got.size()));
    CHECK(got == sent);
    hosts[0].wait_done(sends[peer - 1]);
  }
}

// Far more than anybody buffers, received in the opposite order.
inline void sends_that_nobody_receives_yet(MakeEndpoints make) {
  constexpr int kCount = 1000 / kSlowdown;
  Cluster hosts(make, 2);
  Bytes sent = pattern(8000, 1);
  std::vector<Transfer> sends;
  for (int tag = 0; tag < kCount; ++tag) sends.push_back(hosts[0]->send(1, tag, sent.data() + tag, 7000));
  for (int tag = kCount; tag-- > 0;) {
    Bytes got(7000);
    hosts[1].wait_done(hosts[1]->receive(0, tag, got.data(), got.size()));
    CHECK(std::equal(got.begin(), got.end(), sent.begin() + tag));
  }
  for (auto& send : sends) hosts[0].wait_done(send);
}

inline void tags_are_used_again(MakeEndpoints make) {
  Cluster hosts(make, 2);
  for (int round = 0; round < 100; ++round) hosts.check_transfer(0, 1, 7, pattern(round % 2 ? 100 : 100000, round));
}

inline void messages_come_in_order_and_are_not_held_up(MakeEndpoints make) {
  Cluster hosts(make, 3);
  Bytes unwanted = pattern(1 << 20, 2);
  std::vector<Transfer> sends;  // nobody receives them
  for (int tag = 0; tag < 20; ++tag) sends.push_back(hosts[0]->send(2, tag, unwanted.data(), unwanted.size()));
  std::string large(65536, 'x');
  for (int i = 0; i < 200; ++i) {
    hosts[0]->tell(2, "zero " + std::to_string(i));
    hosts[1]->tell(2, i == 100 ? large : "one " + std::to_string(i));
  }
  hosts[0]->tell(2, "");
  int next[2] = {};
  while (next[0] < 201 || next[1] < 200) {
    auto message = hosts[2].wait_message();
    int i = next[message.peer]++;
    if (message.peer == 0) CHECK_EQ(message.bytes, i == 200 ? "" : "zero " + std::to_string(i));
    if (message.peer == 1) CHECK_EQ(message.bytes, i == 100 ? large : "one " + std::to_string(i));
  }
  CHECK_THROWS(hosts[0]->tell(2, large + "x"), ErrorKind::InvalidUsage);
  for (auto& send : sends) CHECK(!send->ended());
}

inline void transfers_that_are_too_large_are_refused(MakeEndpoints make) {
  Cluster hosts(make, 2);
  Bytes memory(Interhost::kMaxTransfer + 1);
  CHECK_THROWS(hosts[0]->send(1, 1, memory.data(), memory.size()), ErrorKind::InvalidUsage);
  CHECK_THROWS(hosts[0]->receive(1, 1, memory.data(), memory.size()), ErrorKind::InvalidUsage);
}

inline void sizes_that_differ_are_an_error(MakeEndpoints make) {
  Cluster hosts(make, 2);
  Bytes memory(1 << 20);
  auto receive = hosts[1]->receive(0, 3, memory.data(), 900000);
  auto send = hosts[0]->send(1, 3, memory.data(), 1000000);
  CHECK(hosts[1].wait_failed(receive).kind() == ErrorKind::Mismatch);
  Error error = hosts[0].wait_failed(send);
  CHECK(error.kind() == ErrorKind::Mismatch);
  CHECK(contains(error.what(), "1000000 bytes") && contains(error.what(), "900000"));
}

// The memory is the caller's again, here; peer and other tags go on.
inline void withdraw_gives_memory_back(MakeEndpoints make) {
  Cluster hosts(make, 2);
  for (int round = 0; round < 20; round += kSlowdown) {
    constexpr int kCount = 8;
    uint64_t tag = 1000 * (round + 1);
    std::vector<Bytes> sent, got(kCount, Bytes(1 << 20));
    std::vector<Transfer> sends, receives;
    for (int i = 0; i < kCount; ++i) sent.push_back(pattern(1 << 20, tag + i));
    for (int i = 0; i < kCount; ++i) {
      receives.push_back(hosts[1]->receive(0, tag + i, got[i].data(), got[i].size()));
      sends.push_back(hosts[0]->send(1, tag + i, sent[i].data(), sent[i].size()));
    }
    Bytes other = pattern(1 << 20, tag + 500), kept(1 << 20);
    auto keep = hosts[1]->receive(0, tag + 500, kept.data(), kept.size());
    auto keep_send = hosts[0]->send(1, tag + 500, other.data(), other.size());
    std::this_thread::sleep_for(std::chrono::microseconds(200 * round));  // some are on their way
    int side = round / kSlowdown % 2;
    hosts[side]->withdraw({1 - side}, tag, tag + kCount - 1, {ErrorKind::Aborted, "enough"});
    auto& ended = side ? receives : sends;
    for (auto& transfer : ended) CHECK(transfer->ended());
    for (int i = 0; i < kCount; ++i) {
      if (side == 1) {
        std::memset(got[i].data(), 0x77, got[i].size());
      } else {
        Bytes().swap(sent[i]);  // the sanitizer sees who still reads it
      }
    }
    hosts.check_transfer(0, 1, tag + 900, pattern(300000, tag));
    hosts[1].wait_done(keep);
    hosts[0].wait_done(keep_send);
    CHECK(kept == other);
    if (side == 1) {
      Bytes untouched(1 << 20, std::byte{0x77});
      for (auto& bytes : got) CHECK(bytes == untouched);
    } else {
      for (int i = 0; i < kCount; ++i) {  // no half transfer passes for a whole one
        if (receives[i]->state() == Interhost::Transfer::State::Done) CHECK(got[i] == pattern(1 << 20, tag + i));
      }
    }
    hosts[1 - side]->withdraw({side}, tag, tag + kCount - 1, {ErrorKind::Aborted, "heard of it"});
  }
}

inline void a_rank_that_leaves_is_named(MakeEndpoints make) {
  Cluster hosts(make, 3);
  Bytes memory(1 << 20), other = pattern(1 << 20, 3), got(1 << 20);
  auto in = hosts[0]->receive(1, 1, memory.data(), memory.size());
  auto out = hosts[0]->send(1, 2, other.data(), other.size());
  auto unaffected = hosts[0]->receive(2, 3, got.data(), got.size());
  hosts[1]->tell(0, "last words");
  hosts[1].leave();
  for (auto& transfer : {in, out}) {
    Error error = hosts[0].wait_failed(transfer);
    CHECK(error.kind() == ErrorKind::PeerLost);
    CHECK(contains(error.what(), "rank 1") && contains(error.what(), "left"));
  }
  CHECK_EQ(hosts[0].wait_message().bytes, "last words");
  CHECK(hosts[0]->failure(1)->kind() == ErrorKind::PeerLost);
  auto late = hosts[0]->receive(1, 4, memory.data(), 4);
  CHECK(late->state() == Interhost::Transfer::State::Failed);
  hosts[0]->tell(1, "nobody hears this");
  auto send = hosts[2]->send(0, 3, other.data(), other.size());
  hosts[0].wait_done(unaffected);
  hosts[2].wait_done(send);
  CHECK(got == other);
  CHECK(!hosts[0]->failure(2));
}

// Who sees that a peer has failed can hear all that it said before.
inline void last_words_come_before_the_failure(MakeEndpoints make) {
  for (int round = 0; round < 20; round += kSlowdown) {
    Cluster hosts(make, 2);
    for (int i = 0; i < 50; ++i) hosts[1]->tell(0, std::to_string(i));
    std::thread leaves([&] { hosts[1].leave(); });
    while (!hosts[0]->failure(1)) std::this_thread::yield();
    int heard = 0;
    while (hosts[0]->hear()) ++heard;
    leaves.join();
    CHECK_EQ(heard, 50);
  }
}

// What was sent before the goodbye is there.
inline void a_goodbye_loses_nothing(MakeEndpoints make) {
  for (size_t bytes : {size_t{100}, size_t{1} << 20}) {
    Cluster hosts(make, 2);
    Bytes sent = pattern(bytes, 8), got(bytes);
    auto receive = hosts[0]->receive(1, 1, got.data(), bytes);
    hosts[1].wait_done(hosts[1]->send(0, 1, sent.data(), bytes));
    hosts[1].leave();
    hosts[0].wait_done(receive);
    CHECK(got == sent);
  }
}

// Where small transfers go ahead: a rank that is slower than its peer finds what that one sent, and nothing more,
// though it has left meanwhile.
inline void what_was_sent_before_a_goodbye_may_be_asked_for_after_it(MakeEndpoints make) {
  Cluster hosts(make, 2);
  Bytes sent = pattern(4000, 8), got(4000);
  hosts[1].wait_done(hosts[1]->send(0, 1, sent.data(), sent.size()));
  hosts[1].wait_done(hosts[1]->send(0, 2, sent.data(), sent.size()));
  hosts[1].leave();
  hosts[0].wait_lost(1);
  hosts[0].wait_done(hosts[0]->receive(1, 1, got.data(), got.size()));
  CHECK(got == sent);
  CHECK(hosts[0].wait_failed(hosts[0]->receive(1, 1, got.data(), got.size())).kind() == ErrorKind::PeerLost);
  CHECK(hosts[0].wait_failed(hosts[0]->receive(1, 2, got.data(), 10)).kind() == ErrorKind::Mismatch);
}

inline void threads_share_an_endpoint(MakeEndpoints make) {
  constexpr int kThreads = 4, kRounds = 30 / std::min(kSlowdown, 2);
  Cluster hosts(make, 2);
  run_ranks(2 * kThreads, [&](int i) {
    int rank = i % 2, thread = i / 2;
    for (int round = 0; round < kRounds; ++round) {
      size_t bytes = kSizes[(thread + round) % std::size(kSizes)];
      uint64_t tag = thread * 1000 + round;
      Bytes out = pattern(bytes, tag * 2 + rank), in(bytes);
      auto send = hosts[rank]->send(1 - rank, tag, out.data(), bytes);
      auto receive = hosts[rank]->receive(1 - rank, tag, in.data(), bytes);
      hosts[rank].wait_done(send);
      hosts[rank].wait_done(receive);
      CHECK(in == pattern(bytes, tag * 2 + 1 - rank));
    }
  });
}

// Where there are steps, any thread may make them, one at a time.
inline void threads_take_turns_at_steps(MakeEndpoints make) {
  if (!Cluster(make, 2)[0]->has_steps()) return;
  Endpoints hosts = make(2);
  std::mutex turns[2];
  std::atomic<bool> over[2] = {false, false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 6; ++i) {
    threads.emplace_back([&, rank = i % 2] {
      while (!over[rank]) {
        std::lock_guard lock(turns[rank]);
        if (over[rank]) return;
        if (hosts[rank]->step(std::chrono::milliseconds(5)) == Interhost::Step::Over) over[rank] = true;
      }
    });
  }
  Deadline deadline = Deadline::after(seconds(60));
  auto wait = [&](const Transfer& transfer) {
    while (!transfer->ended() && !deadline.passed()) std::this_thread::yield();
    CHECK(transfer->state() == Interhost::Transfer::State::Done);
  };
  for (uint64_t tag = 0; tag < 60 / kSlowdown; ++tag) {
    size_t bytes = kSizes[tag % std::size(kSizes)];
    Bytes sent = pattern(bytes, tag), got(bytes);
    auto receive = hosts[1]->receive(0, tag, got.data(), bytes);
    auto send = hosts[0]->send(1, tag, sent.data(), bytes);
    hosts[tag % 2]->wake();
    wait(receive), wait(send);
    CHECK(got == sent);
  }
  hosts[0]->tell(1, "a message");
  while (hosts[0]->has_unsent() && !deadline.passed()) std::this_thread::yield();
  CHECK(!hosts[0]->has_unsent());
  for (auto& host : hosts) host->stop();
  for (auto& thread : threads) thread.join();
}

}  // namespace syncengine::testing::conformance

#define INTERHOST_CONFORMANCE_CASE(name, make, id) \
  TEST(name##_##id) { ::syncengine::testing::conformance::id(make); }
#define INTERHOST_CONFORMANCE(name, make)                                            \
  INTERHOST_CONFORMANCE_CASE(name, make, moves_bytes_of_every_size)                  \
  INTERHOST_CONFORMANCE_CASE(name, make, many_transfers_at_once)                     \
  INTERHOST_CONFORMANCE_CASE(name, make, one_memory_to_several_peers)                \
  INTERHOST_CONFORMANCE_CASE(name, make, sends_that_nobody_receives_yet)             \
  INTERHOST_CONFORMANCE_CASE(name, make, tags_are_used_again)                        \
  INTERHOST_CONFORMANCE_CASE(name, make, messages_come_in_order_and_are_not_held_up) \
  INTERHOST_CONFORMANCE_CASE(name, make, transfers_that_are_too_large_are_refused)   \
  INTERHOST_CONFORMANCE_CASE(name, make, sizes_that_differ_are_an_error)             \
  INTERHOST_CONFORMANCE_CASE(name, make, withdraw_gives_memory_back)                 \
  INTERHOST_CONFORMANCE_CASE(name, make, a_rank_that_leaves_is_named)                \
  INTERHOST_CONFORMANCE_CASE(name, make, last_words_come_before_the_failure)         \
  INTERHOST_CONFORMANCE_CASE(name, make, a_goodbye_loses_nothing)                    \
  INTERHOST_CONFORMANCE_CASE(name, make, threads_share_an_endpoint)                  \
  INTERHOST_CONFORMANCE_CASE(name, make, threads_take_turns_at_steps)
