#include "transport/tcp/socket.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>

#include "base/error.h"

namespace syncengine::tcp {

namespace {

ParentFd open_socket(const Ip& ip) {
  ParentFd fd([&] { return socket(ip.v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
  if (!fd) throw_system_error("can't open a TCP socket", errno, "socket");
  return fd;
}

void set(int socket, int level, int option, int value) {
  setsockopt(socket, level, option, &value, sizeof(value));  // best effort: no option changes what is correct
}

}  // namespace

ParentFd listen_on(const Ip& ip) {
  ParentFd fd = open_socket(ip);
  if (ip.v6) set(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, 1);
  constexpr int kBacklog = 1024;
  SocketAddress address = socket_address(ip, 0);
  if (bind(fd.get(), address.get(), address.length) != 0 || listen(fd.get(), kBacklog) != 0)
    throw_system_error("can't listen on " + ip.text(), errno, "bind and listen");
  return fd;
}

uint16_t port_of(const ParentFd& listener) {
  SocketAddress own;
  if (getsockname(listener.get(), &own.any, &own.length) != 0)
    throw_system_error("can't find the own port", errno, "getsockname");
  return ntohs(own.any.sa_family == AF_INET6 ? own.v6.sin6_port : own.v4.sin_port);
}

ParentFd accept_on(int listener) {
  return ParentFd([&] { return accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK); });
}

ParentFd begin_connect(const Ip& from, const Ip& to, uint16_t port) {
  ParentFd fd = open_socket(to);
  SocketAddress own = socket_address(from, 0), address = socket_address(to, port);
  // Binds to the address of the chosen interface, if this and the peer's address go together at all. Linux chooses the
  // port when the socket connects, so that many connections may share one.
  if (from.v6 == to.v6 && from.is_loopback() == to.is_loopback()) {
    set(fd.get(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1);
    if (bind(fd.get(), own.get(), own.length) != 0)
      throw_system_error("can't connect from " + from.text(), errno, "bind");
  }
  if (connect(fd.get(), address.get(), address.length) != 0 && errno != EINPROGRESS) {
    int code = errno;
    fd.reset();
    errno = code;
  }
  return fd;
}

bool is_decided(const ParentFd& socket) {
  pollfd wait{socket.get(), POLLOUT, 0};
  return poll(&wait, 1, 0) > 0;  // an interrupted call says nothing
}

int connect_error(const ParentFd& socket) {
  int code = 0;
  socklen_t length = sizeof(code);
  if (getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &code, &length) != 0) return errno;
  return code;
}

void note_icmp(const ParentFd& socket) {
  set(socket.get(), IPPROTO_IP, IP_RECVERR, 1);
  set(socket.get(), IPPROTO_IPV6, IPV6_RECVERR, 1);
}

bool has_icmp(const ParentFd& socket) { return recv(socket.get(), nullptr, 0, MSG_ERRQUEUE) >= 0; }

void send_at_once(const ParentFd& socket) { set(socket.get(), IPPROTO_TCP, TCP_NODELAY, 1); }

void keep_short_queue(int socket, int bytes) { set(socket, IPPROTO_TCP, TCP_NOTSENT_LOWAT, bytes); }

}  // namespace syncengine::tcp
