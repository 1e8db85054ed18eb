// Connecting: strangers on the port, ranks that can't prove who they are, and ranks that don't come.
#include <poll.h>
#include <sys/resource.h>
#include <sys/time.h>

#include <atomic>
#include <csignal>
#include <optional>
#include <thread>

#include "tcp_dial.h"

namespace syncengine::testing {

namespace {

using tcp::Listener;
using tcp::Options;

const Options kQuick{.sockets = 2, .handshake = 0.3, .unauthenticated = 8};

// Ranks 0 and 1 connect while `meanwhile` runs on the side, with rank 0's address.
void connect_two(Options options, const std::function<void(const std::string&, const std::string&)>& meanwhile) {
  Listener zero(options), one(options);
  std::vector<std::string> addresses{zero.address(), one.address()};
  std::unique_ptr<Interhost> ends[2];
  std::exception_ptr failed, failed_there;
  auto keep = [](std::exception_ptr& error, auto&& call) {
    try {
      call();
    } catch (...) {
      error = std::current_exception();
    }
  };
  std::jthread first([&] {
    keep(failed_there, [&] { ends[0] = tcp::connect(std::move(zero), 0, addresses, Deadline::after(seconds(20))); });
  });
  keep(failed, [&] {
    meanwhile(addresses[0], addresses[1]);
    ends[1] = tcp::connect(std::move(one), 1, addresses, Deadline::after(seconds(20)));
  });
  first.join();
  if (failed_there) std::rethrow_exception(failed_there);  // it comes first: the other one may only follow from it
  if (failed) std::rethrow_exception(failed);
  CHECK(ends[0] && ends[1]);
}

bool answers(const tcp::Address& address) {
  UniqueFd fd = tcp::begin_connect(address.ip, address.ip, address.port);
  if (!fd) return false;
  pollfd wait{fd.get(), POLLOUT, 0};
  poll(&wait, 1, 5000);
  return tcp::connect_error(fd) == 0;
}

std::string error_of(const std::function<void()>& call, ErrorKind kind) { return CHECK_THROWS(call(), kind); }

}  // namespace

TEST(tcp_listens_on_the_chosen_address_only_and_not_for_long) {
  Listener listener(kQuick);
  tcp::Address address = tcp::decode_address(0, listener.address());
  CHECK(address.ip.is_loopback());
  CHECK(answers(address));
  tcp::Address elsewhere = address;
  elsewhere.ip.bytes[3] = 2;  // 127.0.0.2 is this machine, too
  CHECK(!answers(elsewhere));
  std::string after;
  connect_two(kQuick, [&](const std::string& zero, const std::string&) { after = zero; });
  CHECK(!answers(tcp::decode_address(0, after)));
}

TEST(tcp_over_ipv6) {
  Options options = kQuick;
  options.interface = "::1";
  connect_two(options, [](auto&, auto&) {});
}

// Garbage, silence, one byte at a time, and more of them than are let in: the ranks connect all the same, and strangers
// are dropped.
TEST(tcp_strangers_disturb_nobody) {
  connect_two(kQuick, [](const std::string& zero, const std::string&) {
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
  Options patient = kQuick;
  patient.handshake = 60;
  connect_two(patient, [](const std::string& zero, const std::string&) {
    std::vector<UniqueFd> idle;
    for (int i = 0; i < 40; ++i) idle.push_back(dial(tcp::decode_address(0, zero)));
    for (int i = 0; i < 40 - 8 - 3; ++i) CHECK(is_closed(idle[i]));  // 3 are expected
  });
}

// Somebody recorded what rank 1 said, and says it again.
TEST(tcp_replay_disturbs_nobody) {
  Listener zero(kQuick), one(kQuick);
  std::vector<std::string> addresses{zero.address(), one.address()};
  std::unique_ptr<Interhost> ends[2];
  Actor actor(1, kQuick);
  addresses[1] = actor.address();
  std::jthread first([&] { ends[0] = tcp::connect(std::move(zero), 0, addresses, Deadline::after(seconds(20))); });
  tcp::Address address = tcp::decode_address(0, addresses[0]);
  auto handshake = actor.greet(0, addresses[0], 1);
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
  UniqueFd control = actor.join_one(0, addresses[0], 0), second = actor.join_one(0, addresses[0], 2);
  first.join();
  CHECK(ends[0] != nullptr);
}

TEST(tcp_wrong_secret_is_named_on_both_ranks) {
  Options zero = kQuick, one = kQuick;
  zero.secret = "a secret of the job";
  one.secret = "another secret, not that";
  Listener listeners[] = {Listener(zero), Listener(one)};
  std::vector<std::string> addresses{listeners[0].address(), listeners[1].address()};
  std::string texts[2];
  run_ranks(2, [&](int rank) {
    texts[rank] =
        error_of([&] { tcp::connect(std::move(listeners[rank]), rank, addresses, Deadline::after(seconds(20))); },
                 ErrorKind::InvalidUsage);
  });
  for (const auto& text : texts) {
    CHECK(contains(text, "rank 0") && contains(text, "rank 1") && contains(text, "SYNCENGINE_SECRET"));
    CHECK(!contains(text, "a secret of the job") && !contains(text, "another secret, not that"));
  }
}

// Whoever reads the launcher's exchange has the addresses, and so a valid ticket.
TEST(tcp_readers_of_the_exchange_do_not_end_init) {
  Options options = kQuick;
  options.secret = "a secret of the job";
  connect_two(options, [&](const std::string& zero, const std::string& one) {
    auto to = tcp::decode_address(0, zero), from = tcp::decode_address(1, one);
    auto keys = tcp::pair_keys(1, from, 0, to, "the secret is not known");
    for (uint8_t sockets : {2, 3}) {
      tcp::ClientHandshake handshake({.build = build_id(),
                                      .connection = 1,
                                      .client = 1,
                                      .server = 0,
                                      .sockets = sockets,
                                      .nonce = tcp::random_bytes(32)},
                                     keys);
      UniqueFd fd = dial(to);
      put(fd, handshake.first_words());
      std::string challenge = get(fd, handshake.wanted());
      CHECK_EQ(challenge.size(), handshake.wanted());
      if (sockets == 2) put(fd, handshake.receive(challenge));
      get(fd, 1);
      CHECK(is_closed(fd));
    }
  });
}

namespace {

// So that only `left` more descriptors can be opened.
class FewDescriptors {
 public:
  explicit FewDescriptors(int left) {
    getrlimit(RLIMIT_NOFILE, &before_);
    UniqueFd next(dup(0));  // those below it are open
    rlimit fewer{static_cast<rlim_t>(next.get() + left), before_.rlim_max};
    setrlimit(RLIMIT_NOFILE, &fewer);
  }
  ~FewDescriptors() { setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_;
};

}  // namespace

TEST(tcp_descriptors_are_counted_before_it_listens) {
  FewDescriptors few(60);
  Options options = kQuick;
  options.peers = 5;
  Listener enough(options);
  options.peers = 63;
  std::string text = error_of([&] { Listener{options}; }, ErrorKind::InvalidUsage);
  CHECK(contains(text, "63 ranks of other hosts, 3 each") && contains(text, "raise ulimit -n to at least "));
}

// Where it was not known how many ranks there would be.
TEST(tcp_descriptors_are_counted_before_it_connects) {
  std::vector<Listener> listeners;
  for (int i = 0; i < 8; ++i) listeners.emplace_back(kQuick);
  std::vector<std::string> addresses;
  for (const Listener& listener : listeners) addresses.push_back(listener.address());
  FewDescriptors few(30);
  std::string text =
      error_of([&] { tcp::connect(std::move(listeners[7]), 7, addresses, Deadline::after(seconds(20))); },
               ErrorKind::InvalidUsage);
  CHECK(contains(text, "7 ranks of other hosts, 3 each") && contains(text, "raise ulimit -n to at least "));
}

TEST(tcp_a_rank_that_can_not_call_says_so) {
  Listener zero(kQuick);
  tcp::Address address = tcp::decode_address(0, zero.address());
  FewDescriptors few(0);
  std::string text =
      error_of([&] { tcp::begin_connect(address.ip, address.ip, address.port); }, ErrorKind::InvalidUsage);
  CHECK(contains(text, "Too many open files") && contains(text, "raise ulimit -n"));
}

TEST(tcp_running_out_of_descriptors_is_named_and_no_rank_is_blamed) {
  Listener zero(kQuick), one(kQuick);
  std::vector<std::string> addresses{zero.address(), one.address()};
  std::vector<UniqueFd> callers;
  for (int i = 0; i < 3; ++i) callers.push_back(dial(tcp::decode_address(0, addresses[0])));
  std::optional<FewDescriptors> few;
  int turns = 0;
  auto interrupted = [&] {
    ++turns;
    if (!few) few.emplace(0);
  };
  std::string text =
      error_of([&] { tcp::connect(std::move(zero), 0, addresses, Deadline::after(seconds(20)), interrupted); },
               ErrorKind::InvalidUsage);
  CHECK(contains(text, "rank 0 can't accept the connections of rank 1: Too many open files"));
  CHECK(contains(text, "raise ulimit -n"));
  CHECK(turns < 100);  // it waits, and does not ask again and again
}

// A signal that comes while a socket is asked says nothing of the socket.
TEST(tcp_signals_connect_nobody) {
  UniqueFd full(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  tcp::Ip here = tcp::decode_address(0, Listener(kQuick).address()).ip;
  auto address = tcp::socket_address(here, 0);
  CHECK(bind(full.get(), address.get(), address.length) == 0 && listen(full.get(), 0) == 0);
  uint16_t port = tcp::port_of(full);
  std::vector<UniqueFd> callers;
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

TEST(tcp_rank_of_another_build_is_named) {
  Listener zero(kQuick), one(kQuick);
  std::vector<std::string> addresses{zero.address(), one.address()};
  addresses[1][4] ^= 2;
  std::string text =
      error_of([&] { tcp::connect(std::move(zero), 0, addresses, Deadline::after(seconds(20))); }, ErrorKind::Mismatch);
  CHECK(contains(text, "rank 1 runs another build of syncengine ("));
}

TEST(tcp_rank_that_does_not_come_is_named) {
  Listener zero(kQuick), one(kQuick), two(kQuick);
  std::vector<std::string> addresses{zero.address(), one.address(), two.address()};
  std::string text =
      error_of([&] { tcp::connect(std::move(one), 1, addresses, Deadline::after(seconds(0.3))); }, ErrorKind::Timeout);
  CHECK(contains(text, "rank 1 waited in init() for ranks 0 (127.0.0.1:") && contains(text, ", 2"));
}

TEST(tcp_rank_that_is_gone_is_named) {
  std::string gone = Listener(kQuick).address();
  Listener one(kQuick);
  std::vector<std::string> addresses{gone, one.address()};
  std::string text =
      error_of([&] { tcp::connect(std::move(one), 1, addresses, Deadline::after(seconds(20))); }, ErrorKind::PeerLost);
  CHECK(contains(text, "rank 0 refused the connection from rank 1 (127.0.0.1:"));
}

TEST(tcp_rank_that_breaks_off_is_named) {
  Listener zero(kQuick), two(kQuick);
  Actor actor(1, kQuick);
  std::vector<std::string> addresses{zero.address(), actor.address(), two.address()};
  std::jthread breaks([&] { actor.join(0, addresses[0]); });
  std::string text =
      error_of([&] { tcp::connect(std::move(zero), 0, addresses, Deadline::after(seconds(20))); }, ErrorKind::PeerLost);
  breaks.join();
  CHECK(contains(text, "rank 1 broke off while the ranks connected"));
}

TEST(tcp_connecting_can_be_interrupted) {
  Listener zero(kQuick), one(kQuick);
  std::vector<std::string> addresses{zero.address(), one.address()};
  std::atomic<int> calls{0};
  auto interrupted = [&] {
    if (++calls == 3) throw Error(ErrorKind::Aborted, "Ctrl-C");
  };
  CHECK_THROWS(tcp::connect(std::move(zero), 0, addresses, Deadline::after(seconds(20)), interrupted),
               ErrorKind::Aborted);
}

TEST(tcp_options_are_checked) {
  for (int sockets : {0, 17}) CHECK_THROWS(Listener({.sockets = sockets}), ErrorKind::InvalidUsage);
  CHECK_THROWS(Listener({.interface = "nosuchinterface"}), ErrorKind::InvalidUsage);
  CHECK_THROWS(Listener({.heartbeat = 1, .silence = 2}), ErrorKind::InvalidUsage);
}

}  // namespace syncengine::testing
