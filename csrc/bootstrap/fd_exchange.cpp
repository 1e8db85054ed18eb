
#include "bootstrap/fd_exchange.h"

#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <map>

#include "base/descriptors.h"
#include "base/error.h"
#include "base/sync_point.h"
#include "base/texts.h"
#include "bootstrap/host.h"
#include "bootstrap/rendezvous.h"
#include "transport/tcp/secret.h"

namespace syncengine::local_socket {

namespace {

constexpr int kBacklog = 128;

UniqueFd open_socket() {
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw_descriptor_error("can't open a local socket", errno);
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

// A message with ancillary data that carries one descriptor.
struct DescriptorMessage {
  iovec piece;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  DescriptorMessage(void* text, size_t bytes) : piece{text, bytes} {
    message.msg_iov = &piece;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
  }
};

bool must_wait(int error) { return error == EAGAIN || error == EINTR; }

}  // namespace

UniqueFd listen(const std::string& name) {
  UniqueFd listener = open_socket();
  sockaddr_un address;
  socklen_t length = fill(address, name);
  if (bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      ::listen(listener.get(), kBacklog) != 0)
    throw_system_error("can't listen on a local socket", errno);
  return listener;
}

Called call(const std::string& name, UniqueFd& socket) {
  if (!socket) socket = open_socket();
  sockaddr_un address;
  socklen_t length = fill(address, name);
  if (connect(socket.get(), reinterpret_cast<sockaddr*>(&address), length) == 0) return Called::Connected;
  return must_wait(errno) ? Called::NotYet : Called::Refused;
}

UniqueFd accept(const UniqueFd& listener) {
  for (;;) {
    UniqueFd fd(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd || errno == EAGAIN) return fd;
    if (errno != EINTR && errno != ECONNABORTED) throw_descriptor_error("can't accept a local connection", errno);
  }
}

bool same_user(const UniqueFd& socket) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  return getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 && credentials.uid == geteuid();
}

Got receive(const UniqueFd& socket, void* message, size_t bytes) {
  ssize_t got = recv(socket.get(), message, bytes, 0);
  if (got < 0 && must_wait(errno)) return Got::Nothing;
  return got == static_cast<ssize_t>(bytes) ? Got::Message : Got::BrokenOff;
}

bool send(const UniqueFd& socket, const void* message, size_t bytes) {
  return ::send(socket.get(), message, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

Sent send_fd(const UniqueFd& socket, const void* message, size_t bytes, int fd) {
  DescriptorMessage buffers(const_cast<void*>(message), bytes);
  cmsghdr* header = CMSG_FIRSTHDR(&buffers.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
  if (sendmsg(socket.get(), &buffers.message, MSG_NOSIGNAL) >= 0) return Sent::Done;
  if (errno == EPIPE || errno == ECONNRESET) return Sent::BrokenOff;
  if (errno != ETOOMANYREFS && !must_wait(errno)) throw_system_error("can't hand shared memory to a peer", errno);
  char byte;  // the kernel looks at that limit before it looks whether the other side is still there
  return recv(socket.get(), &byte, 1, MSG_PEEK) == 0 ? Sent::BrokenOff : Sent::NotYet;
}

Got receive_fd(const UniqueFd& socket, void* message, size_t bytes, UniqueFd& fd, const std::string& who) {
  DescriptorMessage buffers(message, bytes);
  ssize_t got = recvmsg(socket.get(), &buffers.message, MSG_CMSG_CLOEXEC);
  if (got < 0 && must_wait(errno)) return Got::Nothing;
  cmsghdr* header = CMSG_FIRSTHDR(&buffers.message);
  if (got > 0 && header && header->cmsg_type == SCM_RIGHTS) {
    int received = -1;
    std::memcpy(&received, CMSG_DATA(header), sizeof(received));
    fd = UniqueFd(received);
  }
  if (got > 0 && !fd && (buffers.message.msg_flags & MSG_CTRUNC) != 0)
    throw_descriptor_error(who + " can't take another descriptor", EMFILE);
  return got == static_cast<ssize_t>(bytes) && fd ? Got::Message : Got::BrokenOff;
}

}  // namespace syncengine::local_socket

namespace syncengine {

namespace {

std::string random_text(size_t letters) {
  std::string text;
  for (const unsigned char byte : tcp::random_bytes(letters / 2)) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

RendezvousPoint parse(const std::string& address) {
  const size_t slash = address.find('/');
  if (slash == std::string::npos) return {.name = address, .secret = {}};
  return {.name = address.substr(0, slash), .secret = address.substr(slash + 1)};
}

void say_goodbye(const std::vector<UniqueFd>& peers, const Goodbye& goodbye) {
  for (const auto& peer : peers) (void)local_socket::send(peer, &goodbye, sizeof(goodbye));
}

}  // namespace

Error for_peers(const std::string& who, const std::exception_ptr& thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::InvalidUsage) return error;
    return {ErrorKind::Aborted, who + " failed in init: InvalidUsage: " + error.what()};
  } catch (const std::exception& error) {
    return {ErrorKind::Aborted, who + failure_text(error, "init()")};
  } catch (...) {
  }
  return {ErrorKind::Aborted, who + " left init()"};
}

FdExchange::FdExchange()
    : name_("syncengine-" + process_id() + "-" + random_text(16)),
      secret_(random_text(Greeting::kSecretBytes)),
      listener_(local_socket::listen(name_)) {}

std::vector<UniqueFd> FdExchange::exchange(int rank, const std::vector<std::string>& addresses, int own,
                                           Deadline deadline, const std::function<void()>& interrupted,
                                           const RankNames& names) {
  std::map<int, RendezvousPoint> places;
  for (size_t peer = 0; peer < addresses.size(); ++peer) {
    if (!addresses[peer].empty()) places[static_cast<int>(peer)] = parse(addresses[peer]);
  }
  places[rank] = {.name = name_, .secret = secret_};
  sync_point("listening");
  LocalRendezvous rendezvous(rank, std::move(places), own, listener_, names);
  try {
    for (bool first = true; !rendezvous.over(); first = false) {
      if (first) sync_point("connecting");  // nobody has this rank's memory yet
      rendezvous.step();
      if (rendezvous.over()) break;
      if (deadline.passed()) rendezvous.throw_timeout();
      rendezvous.wait();
      if (interrupted) interrupted();
    }
    listener_.reset();
    say_goodbye(rendezvous.served(), Goodbye{});
  } catch (...) {
    const Error told = for_peers(names(rank), std::current_exception());
    Goodbye goodbye{.failed = 1, .kind = told.kind()};
    std::string(told.what()).copy(goodbye.text, sizeof(goodbye.text) - 1);
    say_goodbye(rendezvous.served(), goodbye);
    throw;
  }
  std::vector<UniqueFd> memories(addresses.size());
  for (auto& [peer, memory] : rendezvous.take_memories()) memories[peer] = std::move(memory);
  return memories;
}

}  // namespace syncengine
