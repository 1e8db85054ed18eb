// Connecting: strangers on the port, ranks that can't prove who they are, and ranks that don't come.
#include <poll.h>
#include <sys/resource.h>
#include <sys/time.h>

#include <atomic>
#include <csignal>
#include <optional>
#include <thread>

#include "child.h"
#include "tcp_dial.h"

namespace syncengine::testing {

namespace {

using tcp::Listener;
using tcp::Options;

const Options kOptions{.sockets = 2, .handshake = 60, .unauthenticated = 8};

// Ranks 0 and 1 connect while `meanwhile` runs on the side, with rank 0's address.
void connect_two(Options options, const std::function<void(const std::string&, const std::string&)>& meanwhile) {
  Listeners ranks(2, options);
  std::unique_ptr<Interhost> ends[2];
  run_ranks(2, [&](int rank) {  // rank 0's error comes first: that of rank 1 may only follow from it
    if (rank == 1) meanwhile(ranks.addresses[0], ranks.addresses[1]);
    ends[rank] = ranks.connect(rank);
  });
  CHECK(ends[0] && ends[1]);
}

}  // namespace

TEST(tcp_listens_on_the_chosen_address_only_while_it_lives) {
  Listener listener(kOptions);
  tcp::Address address = tcp::decode_address(0, listener.address());
  CHECK(address.ip.is_loopback());
  CHECK_EQ(dial_error(address), 0);
  tcp::Address elsewhere = address;
  elsewhere.ip.bytes[3] = 2;  // 127.0.0.2 is this machine, too
  CHECK_EQ(dial_error(elsewhere), ECONNREFUSED);
  std::string after;
  connect_two(kOptions, [&](const std::string& zero, const std::string&) { after = zero; });
  CHECK_EQ(dial_error(tcp::decode_address(0, after)), ECONNREFUSED);
}

TEST(tcp_over_ipv6) {
  Options options = kOptions;
  options.interface = "::1";
  connect_two(options, [](auto&, auto&) {});
}

// Garbage, silence, one byte at a time, and more of them than are let in: the ranks connect all the same, and strangers
// are dropped.
TEST(tcp_strangers_disturb_nobody) {
  Options quick = kOptions;
  quick.handshake = 0.3;
  connect_two(quick, [](const std::string& zero, const std::string&) {
    tcp::Address address = tcp::decode_address(0, zero);
    std::vector<UniqueFd> idle;
    for (int i = 0; i < 40; ++i) idle.push_back(dial(address));
    UniqueFd garbage = dial(address);
    put(garbage, std::string(100000, 'g'));
    CHECK(is_closed(garbage));
    UniqueFd http = dial(address);
    put(http, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + std::string(200, ' '));
    CHECK(is_closed(http));
    UniqueFd slow = dial(address);
    auto begin = Clock::now();
    for (int i = 0; i < 50 && Clock::now() - begin < seconds(2); ++i) {
      if (send(slow.get(), "s", 1, MSG_NOSIGNAL) != 1) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(40));
    }
    CHECK(is_closed(slow));
    for (auto& fd : idle) CHECK(is_closed(fd));  // after 0.3 s, or at once to make room
  });
}

// Those that say nothing make room for those that come later, long before their time is up.
TEST(tcp_strangers_are_limited_in_number) {
  connect_two(kOptions, [](const std::string& zero, const std::string&) {
    std::vector<UniqueFd> idle;
    for (int i = 0; i < 40; ++i) idle.push_back(dial(tcp::decode_address(0, zero)));
    for (int i = 0; i < 40 - 8 - 3; ++i) CHECK(is_closed(idle[i]));  // 3 are expected
  });
}

// Somebody recorded what rank 1 said, and says it again.
TEST(tcp_replay_disturbs_nobody) {
  Listeners ranks(1, kOptions);
  Actor actor(1, kOptions);
  const std::string zero = ranks.addresses[0];
  const tcp::Address address = ranks.address_of(0);
  ranks.addresses.push_back(actor.address());
  std::unique_ptr<Interhost> end;
  std::jthread first([&] { end = ranks.connect(0); });
  auto handshake = actor.greet(0, zero, 1);
  std::string hello = handshake.first_words();
  UniqueFd honest = dial(address);
  put(honest, hello);
  std::string answer = handshake.receive(get(honest, handshake.wanted()));
  UniqueFd replay = dial(address);  // while the original is not over
  put(replay, hello);
  CHECK_EQ(get(replay, 1), "");  // no challenge, and closed
  put(honest, answer);
  CHECK_EQ(get(honest, 1).size(), 1u);
  UniqueFd later = dial(address);
  put(later, hello + answer);
  CHECK_EQ(get(later, 1), "");
  UniqueFd control = actor.join_one(0, zero, 0), second = actor.join_one(0, zero, 2);
  first.join();
  CHECK(end != nullptr);
}

// The one that called knows at once. To the other one a rank that has read the addresses looks alike: it goes on
// waiting.
TEST(tcp_wrong_secret_is_named_on_both_ranks) {
  Options zero = kOptions, one = kOptions;
  zero.secret = "a secret of the job";
  one.secret = "another secret, not that";
  with_limit(1, [&](double limit) {
    Listeners ranks(1, zero);
    ranks.add(one);
    run_ranks(2, [&](int rank) {
      const auto text = rank == 0 ? CHECK_THROWS(ranks.connect(0, limit), ErrorKind::Timeout)
                                  : CHECK_THROWS(ranks.connect(1), ErrorKind::InvalidUsage);
      CHECK(contains(text, "rank 0") && contains(text, "rank 1"));
      CHECK(contains(text, rank == 0 ? "somebody called as rank 1 with another secret" : "SYNCENGINE_SECRET"));
      CHECK(!contains(text, zero.secret) && !contains(text, one.secret));
    });
  });
}

// Without a secret, a byte that is changed on the way is no other secret. The test plays rank 0, or what is before it.
TEST(tcp_a_changed_handshake_is_not_said_to_be_another_secret) {
  with_limit(1, [](double limit) {
    Listeners ranks(2, kOptions);
    tcp::Address zero = ranks.address_of(0);
    const tcp::Address one = ranks.address_of(1);
    const ParentFd server = tcp::listen_on(zero.ip);
    zero.port = tcp::port_of(server);
    ranks.addresses[0] = tcp::encode(zero);
    std::atomic<bool> over{false};
    run_ranks(2, [&](int rank) {
      if (rank == 1) {
        const std::shared_ptr<void> end(nullptr, [&](void*) { over = true; });
        const auto text = CHECK_THROWS(ranks.connect(1, limit), ErrorKind::Timeout);
        CHECK(contains(text, "its part of the handshake") && contains(text, "faulty") && !contains(text, "secret"));
        return;
      }
      while (!over) {
        pollfd wait{server.get(), POLLIN, 0};
        if (poll(&wait, 1, 10) <= 0) continue;
        const UniqueFd caller(accept4(server.get(), nullptr, nullptr, SOCK_CLOEXEC));
        const auto keys = tcp::pair_keys(0, zero, 1, one, "");
        tcp::ServerHandshake handshake(tcp::random_bytes(32), [&](const tcp::Hello&) { return std::optional(keys); });
        std::string challenge = handshake.receive(get(caller, handshake.wanted()));
        if (challenge.empty()) continue;  // rank 1 has given up meanwhile
        challenge.back() ^= 1;
        put(caller, challenge);
        get(caller, handshake.wanted());
      }
    });
  });
}

// Ranks that have shown a ticket are not turned away, and who comes behind them waits.
TEST(tcp_a_full_port_is_not_looked_at_again_and_again) {
  with_limit(2, [](double limit) {
    Listeners ranks(1, kOptions);
    Actor actor(1, kOptions);
    const std::string zero = ranks.addresses[0];
    ranks.addresses.push_back(actor.address());
    std::atomic<int> looks{0};
    run_ranks(2, [&](int rank) {
      if (rank == 0) {
        CHECK_THROWS(ranks.connect(0, limit, [&] { ++looks; }), ErrorKind::Timeout);
        return;
      }
      std::vector<UniqueFd> callers;
      for (int i = 0; i < 8 + 3; ++i) {  // 3 are expected
        auto handshake = actor.greet(0, zero, 0);
        callers.push_back(dial(tcp::decode_address(0, zero)));
        put(callers.back(), handshake.first_words());
        CHECK_EQ(get(callers.back(), handshake.wanted()).size(), handshake.wanted());
      }
      callers.push_back(dial(tcp::decode_address(0, zero)));
      CHECK(is_closed(callers.back()));  // when rank 0 has given up
    });
    CHECK(looks < 1000 * limit);  // some 25 a second are enough, and who never waits looks more than 50 000 times
  });
}

// Whoever reads the launcher's exchange has the addresses, and so a valid ticket.
TEST(tcp_readers_of_the_exchange_do_not_end_init) {
  Options options = kOptions;
  options.secret = "a secret of the job";
  connect_two(options, [&](const std::string& zero, const std::string& one) {
    auto to = tcp::decode_address(0, zero), from = tcp::decode_address(1, one);
    auto keys = tcp::pair_keys(1, from, 0, to, "the secret is not known");
    tcp::ClientHandshake handshake({.connection = 1, .client = 1, .server = 0, .nonce = tcp::random_bytes(32)}, keys);
    UniqueFd fd = dial(to);
    put(fd, handshake.first_words());
    std::string challenge = get(fd, handshake.wanted());
    CHECK_EQ(challenge.size(), handshake.wanted());
    put(fd, handshake.receive(challenge));
    get(fd, 1);
    CHECK(is_closed(fd));
  });
}

TEST(tcp_descriptors_are_counted_before_it_connects) {
  Listeners ranks(8, kOptions);
  const Limited few(RLIMIT_NOFILE, next_descriptor() + 30);
  std::string text = CHECK_THROWS(ranks.connect(7), ErrorKind::InvalidUsage);
  CHECK(contains(text, "7 ranks of other hosts, 3 each") && contains(text, "raise ulimit -n to at least "));
}

TEST(tcp_a_rank_that_can_not_call_says_so) {
  Listener zero(kOptions);
  tcp::Address address = tcp::decode_address(0, zero.address());
  const Limited none(RLIMIT_NOFILE, next_descriptor());
  std::string text = CHECK_THROWS(tcp::begin_connect(address.ip, address.ip, address.port), ErrorKind::InvalidUsage);
  CHECK(contains(text, "Too many open files") && contains(text, "raise ulimit -n"));
}

TEST(tcp_running_out_of_descriptors_is_named_and_no_rank_is_blamed) {
  Listeners ranks(2, kOptions);
  std::vector<UniqueFd> callers;
  for (int i = 0; i < 3; ++i) callers.push_back(dial(ranks.address_of(0)));
  std::optional<Limited> none;
  auto interrupted = [&] {
    if (!none) none.emplace(RLIMIT_NOFILE, next_descriptor());
  };
  std::string text = CHECK_THROWS(ranks.connect(0, 20, interrupted), ErrorKind::InvalidUsage);
  CHECK(contains(text, "rank 0 can't accept the connections of rank 1: Too many open files"));
  CHECK(contains(text, "raise ulimit -n"));
}

// A signal that comes while a socket is asked says nothing of the socket.
TEST(tcp_signals_connect_nobody) {
  ParentFd full([] { return socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0); });
  tcp::Ip here = tcp::decode_address(0, Listener(kOptions).address()).ip;
  auto address = tcp::socket_address(here, 0);
  CHECK(bind(full.get(), address.get(), address.length) == 0 && listen(full.get(), 0) == 0);
  uint16_t port = tcp::port_of(full);
  std::vector<ParentFd> callers;
  for (int i = 0; i < 4; ++i) callers.push_back(tcp::begin_connect(here, here, port));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(!tcp::is_decided(callers.back()));  // there is no room for it in the listener's queue
  struct sigaction nothing{}, before{};
  nothing.sa_handler = [](int) {};
  sigaction(SIGALRM, &nothing, &before);
  itimerval often{{0, 50}, {0, 50}}, never{};
  setitimer(ITIMER_REAL, &often, nullptr);
  bool decided = false;
  for (int i = 0; i < 100000 && !decided; ++i) decided = tcp::is_decided(callers.back());
  setitimer(ITIMER_REAL, &never, nullptr);
  sigaction(SIGALRM, &before, nullptr);
  CHECK(!decided);
}

TEST(tcp_rank_that_does_not_come_is_named) {
  Listeners ranks(3, kOptions);
  std::string text = CHECK_THROWS(ranks.connect(1, 0.3), ErrorKind::Timeout);
  CHECK(contains(text, "rank 1 waited in init() for ranks 0 (127.0.0.1:") && contains(text, ", 2"));
}

TEST(tcp_rank_that_does_not_come_is_named_in_a_line_before) {
#ifdef __SANITIZE_THREAD__
  return;  // ThreadSanitizer lets no forked child start threads
#endif
  const std::string line = stderr_of_child([] {
    Options soon = kOptions;
    soon.log_after = 0.1;
    Listeners ranks(3, soon);
    CHECK_THROWS(ranks.connect(1, 2.0), ErrorKind::Timeout);
  });
  CHECK(line.rfind("syncengine: rank 1 still waits in init() for ranks 0 (127.0.0.1:", 0) == 0);
  CHECK(line.find('\n') == line.size() - 1);  // one line
}

TEST(tcp_rank_that_is_gone_is_named) {
  Listeners ranks(2, kOptions);
  {
    Listener gone(std::move(ranks.listeners[0]));
  }
  std::string text = CHECK_THROWS(ranks.connect(1), ErrorKind::PeerLost);
  CHECK(contains(text, "rank 0 refused the connection from rank 1 (127.0.0.1:"));
}

TEST(tcp_rank_that_breaks_off_is_named) {
  Listeners ranks(3, kOptions);
  Actor actor(1, kOptions);
  ranks.addresses[1] = actor.address();
  run_ranks(2, [&](int rank) {
    if (rank == 1) return actor.join(0, ranks.addresses[0]).clear();
    std::string text = CHECK_THROWS(ranks.connect(0), ErrorKind::PeerLost);
    CHECK(contains(text, "rank 1 broke off while the ranks connected"));
  });
}

TEST(tcp_connecting_can_be_interrupted) {
  Listeners ranks(2, kOptions);
  std::atomic<int> calls{0};
  auto interrupted = [&] {
    if (++calls == 3) throw Error(ErrorKind::Aborted, "Ctrl-C");
  };
  CHECK_THROWS(ranks.connect(0, 20, interrupted), ErrorKind::Aborted);
}

TEST(tcp_options_are_checked) {
  for (int sockets : {0, 17}) CHECK_THROWS(Listener({.sockets = sockets}), ErrorKind::InvalidUsage);
  CHECK_THROWS(Listener({.interface = "nosuchinterface"}), ErrorKind::InvalidUsage);
  CHECK_THROWS(Listener({.timing = {.heartbeat = 1, .silence = 2}}), ErrorKind::InvalidUsage);
}

}  // namespace syncengine::testing
