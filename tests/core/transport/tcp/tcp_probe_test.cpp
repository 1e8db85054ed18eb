// When a lost rank counts as dead: once its port refuses, and only for those who have been awake.
#include <cerrno>
#include <optional>
#include <thread>

#include "child.h"
#include "interhost_running.h"
#include "tcp_dial.h"

namespace syncengine::testing {

namespace {

using tcp::Frame;
using tcp::Kind;

// Rank 0, which makes a step when it is told to, and rank 1, played by the test: its port is open until `one` is gone.
struct Pair {
  tcp::Options options;
  std::optional<Actor> one;
  std::string address;  // of rank 0
  std::unique_ptr<Interhost> zero;
  std::vector<UniqueFd> connections;  // of rank 1 to rank 0

  explicit Pair(double heartbeat) : options{.sockets = 1, .timing = {.heartbeat = heartbeat}} {
    one.emplace(1, options);
    tcp::Listener listener(options);
    address = listener.address();
    run_ranks(2, [&](int rank) {
      if (rank == 0)
        zero = tcp::connect(std::move(listener), 0, {address, one->address()}, Deadline::after(seconds(60)));
      else
        connections = one->join(0, address);
    });
  }

  void beat() { put(connections[0], encode(Frame{.kind = Kind::Heartbeat}, false)); }
  // At most so long; whether it has come to that.
  bool steps_until(double limit, const std::function<bool()>& condition) {
    for (Deadline deadline = Deadline::after(seconds(limit)); !condition() && !deadline.passed();)
      zero->step(std::chrono::milliseconds(5));
    return condition();
  }
  bool steps_until_ended(double limit) {
    return steps_until(limit, [&] { return zero->end_of(1) == Interhost::End::Ended; });
  }
  void lose(bool by_reset) {
    for (auto& fd : connections) {
      if (by_reset) reset(fd);
      fd.reset();
    }
  }
};

}  // namespace

TEST(tcp_a_rank_has_ended_once_its_port_refuses) {
  for (bool by_reset : {false, true}) {
    Pair pair(1);
    pair.lose(by_reset);
    CHECK(pair.steps_until(20, [&] { return pair.zero->failure(1).has_value(); }));
    CHECK(!pair.steps_until_ended(0.5));
    pair.one.reset();
    CHECK(pair.steps_until_ended(20));
  }
}

TEST(tcp_who_leaves_in_order_says_whether_its_process_ends) {
  for (bool ends : {false, true}) {
    Pair pair(0.25);
    put(pair.connections[0], encode(Frame{.kind = Kind::Goodbye, .size = ends}, false));
    pair.lose(false);
    CHECK(pair.steps_until(20, [&] { return pair.zero->failure(1).has_value(); }));
    CHECK(pair.zero->end_of(1) == (ends ? Interhost::End::Ended : Interhost::End::Left));
  }
}

// What it reads when it wakes has come long before.
TEST(tcp_who_has_slept_takes_no_refusal) {
  for (bool sleeps : {false, true}) {
    Pair pair(sleeps ? 0.02 : 1);
    for (int i = 0; i < 3; ++i) {
      pair.beat();
      pair.zero->step(std::chrono::milliseconds(5));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(600));
    pair.beat();
    pair.lose(false);
    pair.one.reset();
    CHECK(pair.steps_until(20, [&] { return pair.zero->failure(1).has_value(); }));
    CHECK_EQ(pair.steps_until_ended(sleeps ? 1 : 20), !sleeps);
  }
}

// It may have gone on without the rank that it has lost: whoever is refused so late does not take it for dead.
TEST(tcp_who_has_lost_a_rank_that_lives_keeps_its_port_for_a_while) {
  for (bool lives : {false, true}) {
    Pair pair(lives ? 0.05 : 10);
    pair.lose(true);
    CHECK(pair.steps_until(20, [&] { return pair.zero->failure(1).has_value(); }));
    if (!lives) pair.one.reset();
    if (!lives) CHECK(pair.steps_until_ended(20));
    const auto begin = Clock::now();
    pair.zero->stop();
    while (pair.zero->step(std::chrono::milliseconds(5)) != Interhost::Step::Over) continue;
    if (lives) CHECK(Clock::now() - begin > seconds(0.9));
    if (!lives) CHECK(Clock::now() - begin < seconds(20));
  }
}

TEST(tcp_callers_are_dismissed) {
  Pair pair(0.25);
  const tcp::Address address = tcp::decode_address(0, pair.address);
  std::vector<UniqueFd> callers;
  for (int i = 0; i < 100; ++i) callers.push_back(dial(address));
  pair.steps_until(0.5, [] { return false; });
  for (auto& caller : callers) CHECK(is_closed(caller));
  pair.beat();
  CHECK(!pair.zero->failure(1));
  pair.zero.reset();
  CHECK_EQ(dial_error(address), ECONNREFUSED);
}

TEST(tcp_forked_child_keeps_no_port) {
  std::optional<tcp::Listener> listener(tcp::Options{});
  const tcp::Address address = tcp::decode_address(0, listener->address());
  IdleChild child;
  listener.reset();
  const int error = dial_error(address);
  child.end();
  CHECK_EQ(error, ECONNREFUSED);
}

}  // namespace syncengine::testing
