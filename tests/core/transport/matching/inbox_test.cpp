// Matching without sockets: what a peer may send, and what not.
#include "transport/matching/inbox.h"
#include "test.h"
#include "transport/matching/outbox.h"

namespace syncengine::matching {

using testing::contains;

namespace {

using Transfer = std::shared_ptr<Interhost::Transfer>;

const Error kOver(ErrorKind::Aborted, "over");

struct Side {
  Shared shared{.rank = 0};
  std::string control;
  Withdrawals withdrawals{shared, 1};
  Inbox inbox{shared, 1, control, withdrawals};
  Outbox outbox{shared, 1, control, withdrawals};
  std::vector<std::byte> memory = std::vector<std::byte>(1 << 20);

  Transfer receive(uint64_t tag, size_t bytes) {
    auto transfer = std::make_shared<Interhost::Transfer>();
    inbox.post(tag, memory.data(), bytes, transfer);
    return transfer;
  }
  Transfer send(uint64_t tag, size_t bytes) {
    auto transfer = std::make_shared<Interhost::Transfer>();
    outbox.post(tag, memory.data(), bytes, transfer);
    return transfer;
  }
  void arrive(const Frame& frame) {
    Arrival arrival = inbox.begin(frame);
    inbox.end(arrival);
  }
  // The frames for the other side's control connection, which are gone then.
  std::vector<Frame> told() {
    std::vector<Frame> frames;
    for (; !control.empty(); control.erase(0, kFrameBytes))
      frames.push_back(*decode(control.substr(0, kFrameBytes), Channel::Control, false));
    return frames;
  }
};

Frame chunk(uint64_t handle, uint32_t number, uint32_t bytes = kChunkBytes) {
  return {.kind = Kind::Chunk, .payload = bytes, .handle = handle, .offset = number * kChunkBytes};
}

}  // namespace

TEST(tcp_inbox_takes_chunks_of_any_sizes_in_any_order_once) {
  Side side;
  constexpr uint32_t kBytes = 5 * kChunkUnit + 3;
  auto transfer = side.receive(5, kBytes);
  auto told = side.told();
  CHECK(told.size() == 1 && told[0] == (Frame{.kind = Kind::Ready, .tag = 5, .handle = 1, .size = kBytes}));
  auto part = [](uint32_t unit, uint32_t bytes) {
    return Frame{.kind = Kind::Chunk, .payload = bytes, .handle = 1, .offset = unit * kChunkUnit};
  };
  side.arrive(part(1, 2 * kChunkUnit));
  for (Frame frame : {part(0, 2 * kChunkUnit), part(2, kChunkUnit), part(2, kBytes - 2 * kChunkUnit),
                      part(0, kChunkUnit - 1), part(0, 0), part(5, 2), part(5, 0), part(4, kChunkUnit + 4)})
    CHECK(contains(CHECK_THROWS(side.arrive(frame), ErrorKind::PeerLost), "does not fit its place"));
  side.arrive(part(3, kBytes - 3 * kChunkUnit));
  CHECK(!transfer->ended());
  side.arrive(part(0, kChunkUnit));
  CHECK(transfer->state() == Interhost::Transfer::State::Done);

  Side whole;
  whole.receive(5, 1 << 20);
  CHECK_THROWS(whole.arrive(part(16, 0)), ErrorKind::PeerLost);
}

TEST(tcp_outbox_gives_as_much_as_is_asked_for) {
  Side side;
  side.send(5, kChunkBytes + 1);
  side.outbox.on_ready({.kind = Kind::Ready, .tag = 5, .handle = 1, .size = kChunkBytes + 1});
  CHECK(side.outbox.next(kChunkUnit).frame == chunk(1, 0, kChunkUnit));
  Frame second = side.outbox.next().frame;
  CHECK(second.offset == kChunkUnit && second.payload == kChunkBytes - kChunkUnit + 1);
  CHECK(!side.outbox.has_next());
}

TEST(tcp_inbox_refuses_one_transfer_twice) {
  Frame eager{.kind = Kind::Eager, .payload = 8, .tag = 5};
  Side early;
  early.arrive(eager);
  CHECK_THROWS(early.arrive(eager), ErrorKind::PeerLost);

  Side begun;
  begun.receive(5, 8);
  Arrival first = begun.inbox.begin(eager);
  CHECK_THROWS(begun.inbox.begin(eager), ErrorKind::PeerLost);

  Side asked;  // it was to come in chunks
  asked.receive(5, 8);
  asked.inbox.on_ask({.kind = Kind::Ask, .tag = 5});
  CHECK_THROWS(asked.arrive(eager), ErrorKind::PeerLost);
}

TEST(tcp_inbox_gives_credit_back_for_what_nobody_wants_any_more) {
  Side side;
  side.receive(5, 8);
  side.inbox.withdraw(5, 9, kOver);
  uint32_t credit = 0;
  for (int round = 0; round < 1000; ++round) {  // far more than the window
    side.arrive({.kind = Kind::Eager, .payload = kEagerBytes, .tag = 7});
    for (const Frame& frame : side.told()) credit += frame.size;
  }
  CHECK(credit > 999 * kEagerBytes - kEagerWindow);
}

TEST(tcp_outbox_asks_when_its_credit_is_gone) {
  Side side;
  std::vector<Transfer> sends;
  for (uint64_t tag = 0; tag < 100; ++tag) sends.push_back(side.send(tag, kEagerBytes));
  auto told = side.told();
  size_t eager = kEagerWindow / (kEagerBytes + kEagerCost);
  CHECK_EQ(told.size(), 100 - eager);
  CHECK(told[0] == (Frame{.kind = Kind::Ask, .tag = eager}));
  for (size_t i = 0; i < eager; ++i) side.outbox.written(side.outbox.next());
  CHECK(!side.outbox.has_next());
  side.outbox.on_ready({.kind = Kind::Ready, .tag = 99, .handle = 4, .size = kEagerBytes});
  CHECK(side.outbox.next().frame == chunk(4, 0, kEagerBytes));
  side.outbox.on_credit({.kind = Kind::Credit, .size = 1000});
  CHECK_THROWS(side.outbox.on_credit({.kind = Kind::Credit, .size = kEagerWindow}), ErrorKind::PeerLost);
}

// The caller may free its memory; the peer gets the rest of what it has begun to read.
TEST(tcp_outbox_goes_on_from_a_copy) {
  Side side;
  side.memory[kChunkBytes] = std::byte{42};
  auto begun = side.send(5, 2 * kChunkBytes), waits = side.send(6, 2 * kChunkBytes);
  side.outbox.on_ready({.kind = Kind::Ready, .tag = 5, .handle = 1, .size = 2 * kChunkBytes});
  side.outbox.on_ready({.kind = Kind::Ready, .tag = 6, .handle = 2, .size = 2 * kChunkBytes});
  OutgoingPiece first = side.outbox.next();
  side.outbox.withdraw(0, 9, kOver);
  CHECK(begun->ended() && waits->ended());
  side.memory.assign(side.memory.size(), std::byte{0});
  OutgoingPiece second = side.outbox.next();
  CHECK(second.frame == chunk(1, 1) && second.payload()[0] == std::byte{42});
  CHECK(!side.outbox.has_next());
}

// A group that both sides have left is forgotten, with all that either knew of its tags.
TEST(tcp_withdrawals_are_forgotten_when_both_sides_have_made_them) {
  for (bool first_here : {true, false}) {
    Side side;
    for (uint64_t group = 0; group < 1000; ++group) {
      Frame theirs{.kind = Kind::Withdrawn, .tag = group * 10, .handle = group * 10 + 9, .size = 0};
      if (!first_here) side.withdrawals.hear(theirs);
      side.outbox.withdraw(group * 10, group * 10 + 9, kOver);
      side.inbox.withdraw(group * 10, group * 10 + 9, kOver);
      CHECK_EQ(side.withdrawals.is_withdrawn(group * 10 + 9), first_here);
      if (first_here) side.withdrawals.hear(theirs);
      CHECK_EQ(side.withdrawals.size(), 0u);
      auto told = side.told();
      CHECK(told.size() == 1 && told[0] == theirs);
    }
  }
}

TEST(tcp_withdrawals_wait_for_what_was_sent_before_them) {
  Side side;
  side.arrive({.kind = Kind::Eager, .payload = 8, .tag = 3});
  side.inbox.withdraw(0, 9, kOver);
  side.withdrawals.hear({.kind = Kind::Withdrawn, .tag = 0, .handle = 9, .size = 3});  // of which one has come
  side.arrive({.kind = Kind::Eager, .payload = 8, .tag = 4});
  CHECK(side.withdrawals.is_withdrawn(4));
  side.arrive({.kind = Kind::Eager, .payload = 8, .tag = 5});
  CHECK_EQ(side.withdrawals.size(), 0u);
  CHECK(side.inbox.take_unexpected().empty());
  const Frame again{.kind = Kind::Withdrawn, .tag = 20, .handle = 29, .size = 3};
  side.withdrawals.hear(again);
  CHECK(contains(CHECK_THROWS(side.withdrawals.hear(again), ErrorKind::PeerLost), "one withdrawal twice"));
}

// What is being read while both sides withdraw it is the last that both wait for.
TEST(tcp_withdrawals_drop_what_was_coming_meanwhile) {
  Side side;
  uint32_t credit = 0;
  for (uint32_t round = 0; round < 1000; ++round) {  // far more than the window
    const uint64_t tag = round * 10;
    Arrival arrival = side.inbox.begin({.kind = Kind::Eager, .payload = kEagerBytes, .tag = tag});
    side.inbox.withdraw(tag, tag + 9, kOver);
    side.withdrawals.hear({.kind = Kind::Withdrawn, .tag = tag, .handle = tag + 9, .size = round + 1});
    side.inbox.end(arrival);
    CHECK_EQ(side.withdrawals.size(), 0u);
    for (const Frame& frame : side.told()) credit += frame.size;
  }
  CHECK(side.inbox.take_unexpected().empty());
  CHECK(credit > 999 * kEagerBytes - kEagerWindow);
}

// What no honest peer comes near, and what takes about 1 MiB here.
TEST(tcp_a_peer_can_not_make_this_side_keep_much) {
  auto taken_of = [](const auto& hear) {
    Side side;
    for (uint64_t i = 0;; ++i) {
      try {
        hear(side, i);
      } catch (const Error& error) {
        CHECK(contains(error.what(), "than can be"));
        return i;
      }
    }
  };
  CHECK_EQ(taken_of([](Side& side, uint64_t i) { side.inbox.on_ask({.kind = Kind::Ask, .tag = i}); }), 1u << 14);
  CHECK_EQ(taken_of([](Side& side, uint64_t i) {
             side.outbox.on_ready({.kind = Kind::Ready, .tag = i, .handle = i + 1, .size = 17000});
           }),
           1u << 14);
  CHECK_EQ(taken_of([](Side& side, uint64_t i) {
             side.withdrawals.hear({.kind = Kind::Withdrawn, .tag = 2 * i, .handle = 2 * i + 1});
           }),
           1u << 12);
}

// The count goes around; only differences matter.
TEST(tcp_withdrawals_count_what_was_sent_unasked) {
  Side side;
  for (uint64_t tag = 0; tag < 5; ++tag) side.send(tag, 8);
  side.outbox.next();
  side.outbox.next();
  side.outbox.withdraw(0, 9, kOver);
  auto told = side.told();
  CHECK(told.back() == (Frame{.kind = Kind::Withdrawn, .tag = 0, .handle = 9, .size = 2}));
}

}  // namespace syncengine::matching
