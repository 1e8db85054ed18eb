// Connecting: strangers on the socket, ranks that are missing or gone, and Ctrl-C.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cstddef>
#include <cstring>

#include "bootstrap/handoff.h"
#include "job.h"

namespace syncengine {

using testing::run_ranks;

namespace {

struct Hello {
  uint32_t magic = 0x73796e63;
  int32_t rank = 0;
};

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
    if (peer == rank) {
      CHECK(!memories[peer]);
      continue;
    }
    struct stat status{};
    CHECK_EQ(fstat(memories[peer].get(), &status), 0);
    CHECK_EQ(status.st_size, 4096 * (peer + 1));
    CHECK(fcntl(memories[peer].get(), F_GETFD) & FD_CLOEXEC);
  }
}

std::vector<std::string> names_of(const std::vector<Handoff>& handoffs) {
  std::vector<std::string> names;
  for (const Handoff& handoff : handoffs) names.push_back(handoff.name());
  return names;
}

int open_descriptors() {
  int count = 0;
  for (int fd = 0; fd < 1024; ++fd) count += fcntl(fd, F_GETFD) != -1;
  return count;
}

constexpr Duration kPatience = std::chrono::seconds(20);

void check_exchange(std::vector<Handoff>& handoffs) {
  const auto names = names_of(handoffs);
  run_ranks(static_cast<int>(handoffs.size()), [&](int rank) {
    UniqueFd own = memory_of(rank);
    check_memories(rank, handoffs[rank].exchange(rank, names, own.get(), Deadline::after(kPatience), {}));
  });
}

}  // namespace

TEST(every_rank_gets_the_memory_of_every_other_one) {
  for (int size : {2, 3, 8}) {
    const int before = open_descriptors();
    {
      std::vector<Handoff> handoffs(size);
      check_exchange(handoffs);
    }
    CHECK_EQ(open_descriptors(), before);
  }
}

TEST(names_are_random) { CHECK(Handoff().name() != Handoff().name()); }

TEST(strangers_get_nothing_and_do_no_harm) {
  std::vector<Handoff> handoffs(3);
  const std::string& name = handoffs[0].name();
  std::vector<UniqueFd> strangers;
  strangers.push_back(dial(name));               // says nothing
  strangers.push_back(dial_and_say(name, 'x'));  // too short
  strangers.push_back(dial_and_say(name, Hello{.magic = 1, .rank = 1}));
  strangers.push_back(dial_and_say(name, Hello{.rank = 0}));  // the listener itself
  strangers.push_back(dial_and_say(name, Hello{.rank = 3}));  // no such rank
  strangers.push_back(dial_and_say(name, Hello{.rank = -1}));
  dial(name);  // hangs up at once
  dial_and_say(name, Hello{.magic = 2});
  check_exchange(handoffs);
  for (const UniqueFd& stranger : strangers) CHECK_EQ(descriptors_until_closed(stranger), 0);
}

// Whoever comes second under the name of a rank that was served gets nothing.
TEST(a_rank_is_served_once) {
  Handoff handoff, silent;
  const std::vector<std::string> names{handoff.name(), silent.name()};
  UniqueFd own = memory_of(0);
  UniqueFd first = dial_and_say(handoff.name(), Hello{.rank = 1}),
           second = dial_and_say(handoff.name(), Hello{.rank = 1});
  CHECK_THROWS(handoff.exchange(0, names, own.get(), Deadline::after(seconds(0.2)), {}), ErrorKind::Timeout);
  CHECK_EQ(descriptors_until_closed(first), 1);
  CHECK_EQ(descriptors_until_closed(second), 0);
}

TEST(missing_ranks_are_named) {
  std::vector<Handoff> handoffs(4);
  const auto names = names_of(handoffs);
  run_ranks(4, [&](int rank) {
    if (rank == 1 || rank == 3) return;
    UniqueFd own = memory_of(rank);
    // Long enough for the two to serve each other, also on a busy machine under a sanitizer.
    const Deadline deadline = Deadline::after(seconds(3));
    const auto text = CHECK_THROWS(handoffs[rank].exchange(rank, names, own.get(), deadline, {}), ErrorKind::Timeout);
    // Its own words, or those of the other one that waited.
    CHECK(text == "rank 0 waited in init() for ranks 1, 3" || text == "rank 2 waited in init() for ranks 1, 3");
  });
}

TEST(a_rank_that_is_gone_is_named) {
  Handoff handoff;
  const std::vector<std::string> names{handoff.name(), Handoff().name()};
  UniqueFd own = memory_of(0);
  const auto text =
      CHECK_THROWS(handoff.exchange(0, names, own.get(), Deadline::after(kPatience), {}), ErrorKind::PeerLost);
  CHECK(text.starts_with("rank 0 can't reach rank 1"));
}

TEST(a_rank_that_breaks_off_is_named) {
  Handoff handoff, other;
  const std::vector<std::string> names{handoff.name(), other.name()};
  UniqueFd own = memory_of(0);
  int calls = 0;
  auto interrupted = [&] {
    if (++calls == 2) other = Handoff();  // closes the listener with the call in its queue
  };
  const auto text =
      CHECK_THROWS(handoff.exchange(0, names, own.get(), Deadline::after(kPatience), interrupted), ErrorKind::PeerLost);
  CHECK(text.starts_with("rank 1 "));
}

TEST(a_rank_that_has_called_and_is_gone_is_named) {
  Handoff handoff, silent;
  const std::vector<std::string> names{handoff.name(), silent.name()};
  UniqueFd own = memory_of(0);
  dial_and_say(handoff.name(), Hello{.rank = 1});
  const auto text =
      CHECK_THROWS(handoff.exchange(0, names, own.get(), Deadline::after(kPatience), {}), ErrorKind::PeerLost);
  CHECK(text.starts_with("rank 1 "));
}

TEST(connecting_can_be_interrupted) {
  Handoff handoff, silent;
  const std::vector<std::string> names{handoff.name(), silent.name()};
  UniqueFd own = memory_of(0);
  struct Interrupt {};
  int calls = 0;
  bool caught = false;
  try {
    handoff.exchange(0, names, own.get(), Deadline::after(kPatience), [&] {
      if (++calls == 3) throw Interrupt{};
    });
  } catch (const Interrupt&) {
    caught = true;
  }
  CHECK(caught);
  CHECK_EQ(calls, 3);
}

TEST(ranks_with_different_options_do_not_connect) {
  std::vector<std::string> addresses(2);
  std::barrier ready(2);
  run_ranks(2, [&](int rank) {
    Options options;
    options.arena_bytes = 64 << 20;
    if (rank == 1) options.numerics = Numerics::Ring;
    LocalJob job(rank, 2, options);
    addresses[rank] = job.address();
    ready.arrive_and_wait();
    CHECK_THROWS(job.connect(addresses, Deadline::after(kPatience)), ErrorKind::Mismatch);
    CHECK_THROWS(job.connect({"garbage", "more of it"}, Deadline::after(kPatience)), ErrorKind::InvalidUsage);
  });
}

}  // namespace syncengine
