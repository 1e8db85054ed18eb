// Connecting: strangers on the socket, ranks that are missing or gone, and Ctrl-C.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/un.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <optional>
#include <thread>

#include "bootstrap/fd_exchange.h"
#include "bootstrap/host.h"
#include "child.h"
#include "job.h"

namespace syncengine::testing {

namespace {

UniqueFd dial(const std::string& name) {
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  CHECK_EQ(connect(fd.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
  return fd;
}

template <class T>
UniqueFd dial_and_say(const std::string& name, const T& words) {
  UniqueFd fd = dial(name);
  CHECK_EQ(send(fd.get(), &words, sizeof(words), MSG_NOSIGNAL), static_cast<ssize_t>(sizeof(words)));
  return fd;
}

// How many descriptors came before the other side closed.
int descriptors_until_closed(const UniqueFd& socket) {
  int count = 0;
  for (;;) {
    char bytes[64];
    iovec piece{bytes, sizeof(bytes)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    msghdr message{};
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    if (recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC) <= 0) return count;
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    if (!header || header->cmsg_type != SCM_RIGHTS) continue;
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(header), sizeof(fd));
    UniqueFd received(fd);
    ++count;
  }
}

// Each rank gives a memfd of its own size, so that a mix-up shows.
UniqueFd memory_of(int rank) {
  UniqueFd fd(memfd_create("test", MFD_CLOEXEC));
  CHECK_EQ(ftruncate(fd.get(), 4096 * (rank + 1)), 0);
  return fd;
}

void check_memories(int rank, const std::vector<UniqueFd>& memories) {
  for (int peer = 0; peer < static_cast<int>(memories.size()); ++peer) {
    CHECK_EQ(static_cast<bool>(memories[peer]), peer != rank);
    if (peer == rank) continue;
    struct stat status{};
    CHECK_EQ(fstat(memories[peer].get(), &status), 0);
    CHECK_EQ(status.st_size, 4096 * (peer + 1));
    CHECK(fcntl(memories[peer].get(), F_GETFD) & FD_CLOEXEC);
  }
}

std::vector<std::string> addresses_of(const std::vector<FdExchange>& fd_exchanges) {
  std::vector<std::string> addresses;
  for (const FdExchange& fd_exchange : fd_exchanges) addresses.push_back(fd_exchange.address());
  return addresses;
}

std::string secret_of(const FdExchange& fd_exchange) {
  return fd_exchange.address().substr(fd_exchange.name().size() + 1);
}

Greeting greeting_of(int rank, const std::string& secret) {
  Greeting greeting{.rank = rank};
  secret.copy(greeting.secret.data(), greeting.secret.size());
  return greeting;
}

int count_descriptors() {
  int count = 0;
  for (int fd = 0; fd < 1024; ++fd) count += fcntl(fd, F_GETFD) != -1;
  return count;
}

constexpr Duration kPatience = std::chrono::seconds(60);

std::vector<UniqueFd> exchange(FdExchange& fd_exchange, int rank, const std::vector<std::string>& addresses,
                               const std::function<void()>& interrupted = {}, Duration limit = kPatience) {
  const UniqueFd own = memory_of(rank);
  return fd_exchange.exchange(rank, addresses, own.get(), Deadline::after(limit), interrupted);
}

// Rank 0 calls `interrupted`.
void check_exchange(std::vector<FdExchange>& fd_exchanges, const std::function<void()>& interrupted = {}) {
  const auto addresses = addresses_of(fd_exchanges);
  run_ranks(static_cast<int>(fd_exchanges.size()), [&](int rank) {
    const std::function<void()> nothing;
    check_memories(rank, exchange(fd_exchanges[rank], rank, addresses, rank == 0 ? interrupted : nothing));
  });
}

}  // namespace

TEST(every_rank_gets_the_memory_of_every_other_one) {
  for (int size : {2, 3, 8}) {
    const int before = count_descriptors();
    {
      std::vector<FdExchange> fd_exchanges(size);
      check_exchange(fd_exchanges);
    }
    CHECK_EQ(count_descriptors(), before);
  }
}

TEST(strangers_get_nothing_and_do_no_harm) {
  std::vector<FdExchange> fd_exchanges(3);
  const std::string& name = fd_exchanges[0].name();
  std::vector<UniqueFd> strangers;
  strangers.push_back(dial(name));               // says nothing
  strangers.push_back(dial_and_say(name, 'x'));  // too short
  Greeting of_another_program = greeting_of(1, secret_of(fd_exchanges[0]));
  of_another_program.magic = 1;
  strangers.push_back(dial_and_say(name, of_another_program));
  for (int rank : {0, 3, -1})  // the listener itself, and two that are no ranks
    strangers.push_back(dial_and_say(name, greeting_of(rank, secret_of(fd_exchanges[0]))));
  dial(name);  // hangs up at once
  dial_and_say(name, Greeting{.magic = 2});
  check_exchange(fd_exchanges);
  for (const UniqueFd& stranger : strangers) CHECK_EQ(descriptors_until_closed(stranger), 0);
}

// Whoever comes second under the name of a rank that was served gets nothing.
TEST(a_rank_is_served_once) {
  FdExchange fd_exchange, silent;
  const std::vector<std::string> addresses{fd_exchange.address(), silent.address()};
  const Greeting greeting = greeting_of(1, secret_of(fd_exchange));
  const UniqueFd first = dial_and_say(fd_exchange.name(), greeting);  // both wait in the listener's queue
  const UniqueFd second = dial_and_say(fd_exchange.name(), greeting);
  CHECK_THROWS(exchange(fd_exchange, 0, addresses, {}, seconds(1)), ErrorKind::Timeout);
  CHECK_EQ(descriptors_until_closed(first), 1);
  CHECK_EQ(descriptors_until_closed(second), 0);
}

// Of the same user, and in the same network namespace: the name is in /proc/net/unix.
TEST(who_knows_the_name_but_not_the_secret_gets_nothing) {
  std::vector<FdExchange> fd_exchanges(2);
  const std::string name = fd_exchanges[0].name();
  const auto addresses = addresses_of(fd_exchanges);
  std::atomic<bool> refused{false};
  run_ranks(3, [&](int rank) {
    if (rank == 2) {
      const std::shared_ptr<void> end(nullptr, [&](void*) { refused = true; });  // also of a check that fails
      std::string almost = secret_of(fd_exchanges[0]);
      almost.back() = almost.back() == '0' ? '1' : '0';
      std::vector<UniqueFd> outsiders;
      for (const std::string& wrong : {std::string(), std::string(64, '0'), almost, secret_of(fd_exchanges[1])})
        outsiders.push_back(dial_and_say(name, greeting_of(1, wrong)));
      for (const auto& outsider : outsiders) {
        const timeval limit{.tv_sec = 5, .tv_usec = 0};
        setsockopt(outsider.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
        CHECK_EQ(descriptors_until_closed(outsider), 0);
      }
      return;
    }
    while (rank == 1 && !refused)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // the outsiders come first
    check_memories(rank, exchange(fd_exchanges[rank], rank, addresses));
  });
}

// It answers with what it has heard, and a memory.
TEST(a_listener_that_does_not_know_the_secret_is_not_believed) {
  FdExchange fd_exchange;
  const std::string name = "syncengine-impostor-" + fd_exchange.name().substr(fd_exchange.name().rfind('-') + 1);
  const ParentFd impostor = local_socket::listen(name);
  const std::vector<std::string> addresses{fd_exchange.address(), name + "/" + std::string(64, 'a')};
  run_ranks(2, [&](int rank) {
    if (rank == 0) {
      const auto text = CHECK_THROWS(exchange(fd_exchange, 0, addresses), ErrorKind::PeerLost);
      CHECK(text.starts_with("rank 1 broke off"));
      return;
    }
    using local_socket::Got;
    ParentFd caller;
    auto wait_for = [](auto&& step) {
      while (!step()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    wait_for([&] { return static_cast<bool>(caller = local_socket::accept(impostor)); });
    Greeting greeting;
    wait_for([&] { return local_socket::receive(caller.get(), &greeting, sizeof(greeting)) == Got::Message; });
    greeting.rank = 1;
    UniqueFd bait = memory_of(1);
    CHECK(local_socket::send_fd(caller.get(), &greeting, sizeof(greeting), bait.get()) == local_socket::Sent::Done);
    Greeting more;
    wait_for([&] { return local_socket::receive(caller.get(), &more, sizeof(more)) == Got::BrokenOff; });
  });
}

TEST(names_and_secrets_are_random_and_no_name_has_a_secret) {
  FdExchange fd_exchange;
  CHECK(fd_exchange.name() != FdExchange().name() && secret_of(fd_exchange) != secret_of(FdExchange()));
  CHECK_EQ(secret_of(fd_exchange).size(), 64U);
  CHECK(fd_exchange.address().size() < FdExchange::kMostAddress);
  std::ifstream sockets("/proc/net/unix");
  const std::string text((std::istreambuf_iterator<char>(sockets)), {});
  CHECK(contains(text, fd_exchange.name()) && !contains(text, secret_of(fd_exchange)));
}

TEST(crowds_of_strangers_leave_room_for_ranks) {
  std::vector<FdExchange> fd_exchanges(2);
  std::vector<UniqueFd> strangers;
  for (int i = 0; i < 100; ++i) strangers.push_back(dial(fd_exchanges[0].name()));
  const int before = count_descriptors();
  int most = 0;
  check_exchange(fd_exchanges, [&] { most = std::max(most, count_descriptors()); });
  CHECK(most - before < 90);
}

TEST(missing_ranks_are_named) {
  with_limit(2, [](double limit) {  // within which ranks 0 and 2 serve each other
    std::vector<FdExchange> fd_exchanges(4);
    const auto addresses = addresses_of(fd_exchanges);
    run_ranks(4, [&](int rank) {
      if (rank == 1 || rank == 3) return;
      const auto text =
          CHECK_THROWS(exchange(fd_exchanges[rank], rank, addresses, {}, seconds(limit)), ErrorKind::Timeout);
      // Its own words, or those of the other one that waited.
      CHECK(text == "rank 0 waited in init() for ranks 1, 3" || text == "rank 2 waited in init() for ranks 1, 3");
    });
  });
}

TEST(a_rank_that_is_gone_is_named) {
  FdExchange fd_exchange;
  const std::vector<std::string> addresses{fd_exchange.address(), FdExchange().address()};
  const auto text = CHECK_THROWS(exchange(fd_exchange, 0, addresses), ErrorKind::PeerLost);
  CHECK(text.starts_with("rank 0 can't reach rank 1"));
}

// One that has not called itself, and one that has.
TEST(a_rank_that_breaks_off_is_named) {
  for (bool calls : {false, true}) {
    FdExchange fd_exchange, other;
    const std::vector<std::string> addresses{fd_exchange.address(), other.address()};
    UniqueFd called;
    if (calls) called = dial_and_say(fd_exchange.name(), Greeting{.rank = 1});
    int looks = 0;
    auto end = [&] {
      if (++looks != 2) return;
      called.reset();
      other = FdExchange();  // closes the listener with the call in its queue
    };
    const auto text = CHECK_THROWS(exchange(fd_exchange, 0, addresses, end), ErrorKind::PeerLost);
    CHECK(text.starts_with("rank 1 "));
  }
}

TEST(a_forked_child_keeps_no_socket) {
  using local_socket::Called;
  std::optional<FdExchange> fd_exchange(std::in_place);
  const std::string name = fd_exchange->name();
  ParentFd caller, other;
  CHECK(local_socket::call(name, caller) == Called::Connected);
  IdleChild child;
  fd_exchange.reset();
  const Called again = local_socket::call(name, other);
  Greeting greeting;
  const auto heard = local_socket::receive(caller.get(), &greeting, sizeof(greeting));
  child.end();
  CHECK(again == Called::Refused);
  CHECK(heard == local_socket::Got::BrokenOff);
}

TEST(a_death_is_seen_beside_signals) {
  CHECK(true_in_child([] {
    const pid_t dying = start_child([] {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      return true;
    });
    struct sigaction action{};
    action.sa_handler = [](int) {};
    sigaction(SIGALRM, &action, nullptr);
    const itimerval often{.it_interval = {.tv_sec = 0, .tv_usec = 5000}, .it_value = {.tv_sec = 0, .tv_usec = 5000}};
    setitimer(ITIMER_REAL, &often, nullptr);
    const std::string own = process_id();
    const std::string other = own.substr(0, own.rfind('-') + 1) + std::to_string(dying);
    bool seen = false;
    for (const Deadline deadline = Deadline::after(kPatience); !seen && !deadline.passed();) {
      const auto begin = Clock::now();
      const std::set<int> found = ended({{3, own}, {5, other}});
      seen = found == std::set<int>{5};
      if (!seen && (!found.empty() || Clock::now() - begin < seconds(0.15))) break;  // it has to look for 0.2 s
    }
    setitimer(ITIMER_REAL, std::array<itimerval, 1>{}.data(), nullptr);
    return seen && was_true(dying);
  }));
}

TEST(ranks_do_not_connect_to_what_is_no_address) {
  Options options;
  options.arena_bytes = 64 << 20;
  LocalBootstrap job(0, 2, options);
  CHECK_THROWS(job.connect({"garbage", "more of it"}, Deadline::after(kPatience)), ErrorKind::InvalidUsage);
}

TEST(a_limit_on_descriptors_that_is_too_low_is_told_before_anything_else) {
  CHECK(true_in_child([] {
    std::vector<FdExchange> fd_exchanges(9);
    const auto addresses = addresses_of(fd_exchanges);
    UniqueFd own = memory_of(0);
    const int open = count_descriptors();
    const Limited few(RLIMIT_NOFILE, open + 20);  // it takes 24
    const auto text = CHECK_THROWS(fd_exchanges[4].exchange(4, addresses, own.get(), Deadline::after(kPatience), {}),
                                   ErrorKind::InvalidUsage);
    CHECK(text.starts_with("rank 4 with 8 peers on its host needs 24 file descriptors"));
    CHECK(contains(text, "ulimit -n is " + std::to_string(open + 20)));
    CHECK(contains(text, "raise ulimit -n to at least " + std::to_string(open + 24)));
    return true;
  }));
}

// Others of its process may take them meanwhile.
TEST(a_rank_that_runs_out_of_descriptors_says_so) {
  CHECK(true_in_child([] {
    FdExchange fd_exchange, silent;
    const std::vector<std::string> addresses{fd_exchange.address(), silent.address()};
    UniqueFd own = memory_of(0), caller;
    const Limited few(RLIMIT_NOFILE, next_descriptor() + 10);
    std::vector<UniqueFd> taken;
    auto take_all = [&] {
      if (caller) return;
      caller = dial(fd_exchange.name());
      for (UniqueFd fd(dup(0)); fd; fd = UniqueFd(dup(0))) taken.push_back(std::move(fd));
    };
    const auto text = CHECK_THROWS(fd_exchange.exchange(0, addresses, own.get(), Deadline::after(kPatience), take_all),
                                   ErrorKind::InvalidUsage);
    return contains(text, "ulimit -n");
  }));
  CHECK(true_in_child([] {
    const auto [one, other] = socket_pair(SOCK_NONBLOCK);
    UniqueFd own = memory_of(3), received;
    char letter = 'x';
    CHECK(local_socket::send_fd(one.get(), &letter, 1, own.get()) == local_socket::Sent::Done);
    const Limited none(RLIMIT_NOFILE, next_descriptor());
    const auto text =
        CHECK_THROWS(local_socket::receive_fd(other.get(), &letter, 1, received, "rank 7"), ErrorKind::InvalidUsage);
    return contains(text, "rank 7") && contains(text, "ulimit -n");
  }));
}

namespace {

// Runs `body` as an ordinary user of whom the kernel passes on no more descriptors, until the one that `body` gets is
// closed. It lets an administrator go beyond; and only he can become somebody else, whom nobody's other processes
// disturb.
void with_descriptors_in_flight(const std::function<void(UniqueFd&)>& body) {
#ifdef __SANITIZE_THREAD__
  return;  // it lets no forked child start threads
#endif
  if (geteuid() != 0) {
    std::fprintf(stderr, "        not tried: only root can become a user of whom nobody else has processes\n");
    return;
  }
  CHECK(true_in_child([&] {
    constexpr uid_t kNobody = 54321;
    CHECK_EQ(setgid(kNobody), 0);
    CHECK_EQ(setuid(kNobody), 0);
    using local_socket::Sent;
    auto [sender, receiver] = socket_pair(SOCK_NONBLOCK);
    char byte = 0;
    for (int i = 0; i < 140; ++i) CHECK(local_socket::send_fd(sender.get(), &byte, 1, 0) == Sent::Done);
    const Limited few(RLIMIT_NOFILE, 120);
    CHECK(local_socket::send_fd(sender.get(), &byte, 1, 0) == Sent::NotYet);
    CHECK_EQ(send(sender.get(), &byte, 1, MSG_NOSIGNAL), 1);  // the socket has room
    body(receiver);
    return true;
  }));
}

}  // namespace

TEST(a_limit_on_descriptors_in_flight_is_waited_out) {
  with_descriptors_in_flight([](UniqueFd& receiver) {
    std::vector<FdExchange> fd_exchanges(3);
    int calls = 0;
    check_exchange(fd_exchanges, [&] {
      if (++calls == 20) receiver.reset();
    });
    CHECK(calls >= 20);  // nobody had come through before
  });
}

TEST(a_limit_on_descriptors_in_flight_is_named_at_the_deadline) {
  with_descriptors_in_flight([](UniqueFd&) {
    with_limit(1, [](double limit) {
      std::vector<FdExchange> fd_exchanges(2);
      const auto addresses = addresses_of(fd_exchanges);
      run_ranks(2, [&](int rank) {
        const Duration patience = rank == 0 ? seconds(limit) : kPatience;
        const ErrorKind kind = rank == 0 ? ErrorKind::Timeout : ErrorKind::PeerLost;
        const auto text = CHECK_THROWS(exchange(fd_exchanges[rank], rank, addresses, {}, patience), kind);
        if (rank == 0) CHECK(contains(text, "no more descriptors of this user than ulimit -n allows"));
      });
    });
  });
}

// It has said who it is, and waits for the memory.
TEST(a_rank_that_goes_while_descriptors_are_in_flight_is_lost) {
  with_descriptors_in_flight([](UniqueFd&) {
    FdExchange fd_exchange, other;
    const std::vector<std::string> addresses{fd_exchange.address(), other.address()};
    run_ranks(2, [&](int rank) {
      if (rank == 1) {
        const UniqueFd called = dial_and_say(fd_exchange.name(), greeting_of(1, secret_of(fd_exchange)));
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        return;
      }
      const auto text = CHECK_THROWS(exchange(fd_exchange, 0, addresses), ErrorKind::PeerLost);
      CHECK(text.starts_with("rank 1 "));
    });
  });
}

}  // namespace syncengine::testing
