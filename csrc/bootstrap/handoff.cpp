#include "bootstrap/handoff.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <set>

#include "base/sync_point.h"
#include "bootstrap/process.h"

namespace syncengine {

namespace {

constexpr int kBacklog = 128;

struct Hello {
  uint32_t magic = 0x73796e63;  // "sync"
  int32_t rank = -1;
};

// How a rank is done with connecting, for those that have its memory and still miss somebody else's.
struct Goodbye {
  int32_t failed = 0;
  ErrorKind kind = ErrorKind::Aborted;
  char text[248] = {};
};

constexpr const char* kPrefix = "syncengine-";

// "syncengine-<process>-<random>"
std::string random_name() {
  unsigned char bytes[8];
  if (getrandom(bytes, sizeof(bytes), 0) != sizeof(bytes)) throw_system_error("no random bytes", errno);
  std::string text = kPrefix + process_id() + "-";
  for (unsigned char byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

std::string process_of(const std::string& name) {
  size_t begin = std::strlen(kPrefix), end = name.rfind('-');
  return end == std::string::npos || end < begin ? "" : name.substr(begin, end - begin);
}

UniqueFd open_socket() {
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw_system_error("can't open a local socket", errno);
  return fd;
}

// An abstract address: a name behind a zero byte.
socklen_t fill(sockaddr_un& address, const std::string& name) {
  address = {};
  address.sun_family = AF_UNIX;
  size_t length = std::min(name.size(), sizeof(address.sun_path) - 1);
  std::memcpy(address.sun_path + 1, name.data(), length);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
}

bool same_user(int fd) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 && credentials.uid == geteuid();
}

std::string names_of(const std::set<int>& ranks) {
  std::string list;
  for (int rank : ranks) list += (list.empty() ? "" : ", ") + std::to_string(rank);
  return (ranks.size() == 1 ? "rank " : "ranks ") + list;
}

// Ancillary data that carries one descriptor.
struct Envelope {
  Hello hello;
  iovec piece{&hello, sizeof(hello)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  Envelope() {
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
  }
};

// Whether the peer is still there.
bool send_fd(int socket, int rank, int fd) {
  Envelope envelope;
  envelope.hello.rank = rank;
  cmsghdr* header = CMSG_FIRSTHDR(&envelope.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
  if (sendmsg(socket, &envelope.message, MSG_NOSIGNAL) >= 0) return true;
  if (errno != EPIPE && errno != ECONNRESET) throw_system_error("can't hand shared memory to a peer", errno);
  return false;
}

enum class Answer { None, Came, BrokeOff };

// The peer's memory.
Answer receive_fd(int socket, int rank, UniqueFd& fd) {
  Envelope envelope;
  ssize_t got = recvmsg(socket, &envelope.message, MSG_CMSG_CLOEXEC);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return Answer::None;
  cmsghdr* header = CMSG_FIRSTHDR(&envelope.message);
  if (got > 0 && header && header->cmsg_type == SCM_RIGHTS) {
    int received = -1;
    std::memcpy(&received, CMSG_DATA(header), sizeof(received));
    fd = UniqueFd(received);
  }
  return got == sizeof(Hello) && envelope.hello.rank == rank && fd ? Answer::Came : Answer::BrokeOff;
}

// Throws the peer's error if it has failed.
Answer receive_goodbye(int socket) {
  Goodbye goodbye;
  ssize_t got = recv(socket, &goodbye, sizeof(goodbye), 0);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return Answer::None;
  if (got != sizeof(goodbye)) return Answer::BrokeOff;
  goodbye.text[sizeof(goodbye.text) - 1] = '\0';
  if (goodbye.failed) throw Error(goodbye.kind, goodbye.text);
  return Answer::Came;
}

void say_goodbye(const std::vector<UniqueFd>& peers, const Goodbye& goodbye) {
  for (const auto& peer : peers) (void)!send(peer.get(), &goodbye, sizeof(goodbye), MSG_NOSIGNAL);
}

void say_goodbye(const std::vector<UniqueFd>& peers, ErrorKind kind, const std::string& text) {
  Goodbye goodbye{.failed = 1, .kind = kind};
  text.copy(goodbye.text, sizeof(goodbye.text) - 1);
  say_goodbye(peers, goodbye);
}

// Nothing if nobody listens there.
UniqueFd call(const std::string& name, int rank, int peer) {
  UniqueFd socket = open_socket();
  sockaddr_un address;
  socklen_t length = fill(address, name);
  if (connect(socket.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) return {};
  if (!same_user(socket.get()))
    throw Error(ErrorKind::InvalidUsage, "rank " + std::to_string(peer) + " runs as another user");
  Hello hello{.rank = rank};
  if (send(socket.get(), &hello, sizeof(hello), MSG_NOSIGNAL) != sizeof(hello)) return {};
  return socket;
}

// Whoever fails breaks off with everybody: the dead are to blame, not those who noticed first.
[[noreturn]] void throw_lost(const std::set<int>& lost, const std::set<int>& dead) {
  if (!dead.empty()) throw Error(ErrorKind::PeerLost, names_of(dead) + " died while the ranks connected");
  throw Error(ErrorKind::PeerLost, names_of(lost) + " broke off while the ranks connected: see its own error");
}

[[noreturn]] void throw_unreachable(int rank, const std::set<int>& unreachable, const std::set<int>& dead) {
  if (!dead.empty()) throw_lost(unreachable, dead);
  throw Error(ErrorKind::PeerLost,
              "rank " + std::to_string(rank) + " can't reach " + names_of(unreachable) +
                  " through this host's memory, though it runs on the same host: it died or broke off");
}

}  // namespace

Error for_peers(int rank, const Error& error) {
  if (error.kind() != ErrorKind::InvalidUsage) return error;
  return {ErrorKind::Aborted, "rank " + std::to_string(rank) + " failed in init: InvalidUsage: " + error.what()};
}

Handoff::Handoff() : name_(random_name()), listener_(open_socket()) {
  sockaddr_un address;
  socklen_t length = fill(address, name_);
  if (bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      listen(listener_.get(), kBacklog) != 0)
    throw_system_error("can't listen on a local socket", errno);
}

std::vector<UniqueFd> Handoff::exchange(int rank, const std::vector<std::string>& names, int own, Deadline deadline,
                                        const std::function<void()>& interrupted) {
  std::vector<UniqueFd> served;
  try {
    auto memories = meet(rank, names, own, deadline, interrupted, served);
    say_goodbye(served, Goodbye{});
    return memories;
  } catch (const Error& error) {
    Error told = for_peers(rank, error);
    say_goodbye(served, told.kind(), told.what());
    throw;
  } catch (...) {
    say_goodbye(served, ErrorKind::Aborted, "rank " + std::to_string(rank) + " was interrupted (Ctrl-C) in init()");
    throw;
  }
}

std::vector<UniqueFd> Handoff::meet(int rank, const std::vector<std::string>& names, int own, Deadline deadline,
                                    const std::function<void()>& interrupted, std::vector<UniqueFd>& served) {
  int size = static_cast<int>(names.size());
  std::vector<UniqueFd> calls(size), memories(size), strangers;
  // Peers whose memory is missing, that miss ours, and that have given theirs but still miss somebody else's.
  std::set<int> wanted, unserved, busy, lost;
  std::map<int, std::string> processes;
  sync_point("listening");
  for (int peer = 0; peer < size; ++peer) {
    if (peer == rank || names[peer].empty()) continue;
    processes[peer] = process_of(names[peer]);
    calls[peer] = call(names[peer], rank, peer);
    if (!calls[peer]) lost.insert(peer);
    wanted.insert(peer);
  }
  if (!lost.empty()) throw_unreachable(rank, lost, ended(processes));
  sync_point("connecting");
  unserved = wanted;
  while (!wanted.empty() || !unserved.empty()) {
    std::vector<pollfd> waits{{listener_.get(), POLLIN, 0}};
    for (const auto* peers : {&wanted, &busy}) {
      for (int peer : *peers) waits.push_back({calls[peer].get(), POLLIN, 0});
    }
    for (auto& stranger : strangers) waits.push_back({stranger.get(), POLLIN, 0});
    poll(waits.data(), waits.size(), 50);
    if (interrupted) interrupted();
    for (UniqueFd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)); fd;
         fd = UniqueFd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK))) {
      if (same_user(fd.get())) strangers.push_back(std::move(fd));
    }
    // Whoever greets properly gets the memory; anybody else is dropped.
    std::erase_if(strangers, [&](UniqueFd& stranger) {
      Hello hello{.magic = 0};
      ssize_t got = recv(stranger.get(), &hello, sizeof(hello), 0);
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
      if (got == sizeof(hello) && hello.magic == Hello{}.magic && unserved.erase(hello.rank)) {
        if (!send_fd(stranger.get(), rank, own)) {
          lost.insert(hello.rank);
          return true;
        }
        served.push_back(std::move(stranger));
        sync_point("handed");
      }
      return true;
    });
    std::erase_if(busy, [&](int peer) {
      Answer answer = receive_goodbye(calls[peer].get());
      if (answer == Answer::BrokeOff) lost.insert(peer);
      return answer == Answer::Came;
    });
    std::erase_if(wanted, [&](int peer) {
      Answer answer = receive_fd(calls[peer].get(), peer, memories[peer]);
      if (answer == Answer::BrokeOff) lost.insert(peer);
      if (answer == Answer::Came) busy.insert(peer);
      return answer == Answer::Came;
    });
    if (!lost.empty()) throw_lost(lost, ended(processes));
    if (deadline.passed() && !(wanted.empty() && unserved.empty())) {
      wanted.merge(unserved);
      throw Error(ErrorKind::Timeout, "rank " + std::to_string(rank) + " waited in init() for " + names_of(wanted));
    }
  }
  listener_.reset();
  return memories;
}

}  // namespace syncengine
