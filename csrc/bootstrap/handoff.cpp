#include "bootstrap/handoff.h"

#include <poll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <set>

#include "base/error.h"
#include "base/sync_point.h"

namespace syncengine {

namespace {

constexpr int kBacklog = 128;

struct Hello {
  uint32_t magic = 0x73796e63;  // "sync"
  int32_t rank = -1;
};

std::string random_name() {
  unsigned char bytes[16];
  if (getrandom(bytes, sizeof(bytes), 0) != sizeof(bytes)) throw_system_error("no random bytes", errno);
  std::string text = "syncengine-";
  for (unsigned char byte : bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
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

void send_fd(int socket, int rank, int fd) {
  Envelope envelope;
  envelope.hello.rank = rank;
  cmsghdr* header = CMSG_FIRSTHDR(&envelope.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
  if (sendmsg(socket, &envelope.message, MSG_NOSIGNAL) < 0) throw_system_error("can't hand shared memory to a peer", errno);
}

// The descriptor, or none yet. Throws PeerLost if the peer is gone.
UniqueFd receive_fd(int socket, int rank) {
  Envelope envelope;
  ssize_t got = recvmsg(socket, &envelope.message, MSG_CMSG_CLOEXEC);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return {};
  UniqueFd fd;
  cmsghdr* header = CMSG_FIRSTHDR(&envelope.message);
  if (got > 0 && header && header->cmsg_type == SCM_RIGHTS) {
    int received = -1;
    std::memcpy(&received, CMSG_DATA(header), sizeof(received));
    fd = UniqueFd(received);
  }
  if (got != sizeof(Hello) || envelope.hello.rank != rank || !fd)
    throw Error(ErrorKind::PeerLost, "rank " + std::to_string(rank) + " died or broke off while the ranks connected");
  return fd;
}

UniqueFd call(const std::string& name, int rank, int peer) {
  UniqueFd socket = open_socket();
  sockaddr_un address;
  socklen_t length = fill(address, name);
  if (connect(socket.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) {
    throw Error(ErrorKind::PeerLost, "rank " + std::to_string(rank) + " can't reach rank " + std::to_string(peer) +
                                         " through this host's memory (" + std::strerror(errno) +
                                         "): it died, or runs on another host or network namespace; all ranks must share one host");
  }
  if (!same_user(socket.get()))
    throw Error(ErrorKind::InvalidUsage, "rank " + std::to_string(peer) + " runs as another user");
  Hello hello{.rank = rank};
  if (send(socket.get(), &hello, sizeof(hello), MSG_NOSIGNAL) != sizeof(hello))
    throw_system_error("can't greet rank " + std::to_string(peer), errno);
  return socket;
}

}  // namespace

Handoff::Handoff() : name_(random_name()), listener_(open_socket()) {
  sockaddr_un address;
  socklen_t length = fill(address, name_);
  if (bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 || listen(listener_.get(), kBacklog) != 0)
    throw_system_error("can't listen on a local socket", errno);
}

std::vector<UniqueFd> Handoff::exchange(int rank, const std::vector<std::string>& names, int own, Deadline deadline,
                                        const std::function<void()>& interrupted) {
  size_t size = names.size();
  std::vector<UniqueFd> calls(size), memories(size), strangers;
  for (size_t peer = 0; peer < size; ++peer) {
    if (static_cast<int>(peer) != rank) calls[peer] = call(names[peer], rank, static_cast<int>(peer));
  }
  sync_point("connecting");
  std::set<int> served, wanted;
  for (size_t peer = 0; peer < size; ++peer) {
    if (static_cast<int>(peer) != rank) wanted.insert(static_cast<int>(peer));
  }
  std::set<int> unserved = wanted;
  while (!wanted.empty() || !unserved.empty()) {
    std::vector<pollfd> waits{{listener_.get(), POLLIN, 0}};
    for (int peer : wanted) waits.push_back({calls[peer].get(), POLLIN, 0});
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
      if (got == sizeof(hello) && hello.magic == Hello{}.magic && unserved.erase(hello.rank)) send_fd(stranger.get(), rank, own);
      return true;
    });
    for (auto peer = wanted.begin(); peer != wanted.end();) {
      memories[*peer] = receive_fd(calls[*peer].get(), *peer);
      peer = memories[*peer] ? wanted.erase(peer) : std::next(peer);
    }
    if (deadline.passed() && !(wanted.empty() && unserved.empty())) {
      std::string list;
      wanted.merge(unserved);
      for (int peer : wanted) list += (list.empty() ? "" : ", ") + std::to_string(peer);
      throw Error(ErrorKind::Timeout, "rank " + std::to_string(rank) + " waited in init() for ranks " + list);
    }
  }
  listener_.reset();
  return memories;
}

}  // namespace syncengine
