// A TCP peer that keeps to the protocol as far as a test wants, and no further: blocking sockets, by hand.
#pragma once

#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "test.h"
#include "transport/matching/frame.h"
#include "transport/tcp/rendezvous.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/tcp.h"

namespace syncengine::testing {

// A blocking socket; reads fail after a minute.
inline UniqueFd new_socket(const tcp::Address& address) {
  UniqueFd fd(socket(address.ip.v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  timeval limit{.tv_sec = 60, .tv_usec = 0};
  setsockopt(fd.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  return fd;
}

// Connects with whoever listens there; returns 0, or the error.
inline int dial_error(const tcp::Address& address, const UniqueFd& fd) {
  auto to = tcp::socket_address(address.ip, address.port);
  return connect(fd.get(), to.get(), to.length) == 0 ? 0 : errno;
}
inline int dial_error(const tcp::Address& address) { return dial_error(address, new_socket(address)); }

inline UniqueFd dial(const tcp::Address& address) {
  UniqueFd fd = new_socket(address);
  CHECK_EQ(dial_error(address, fd), 0);
  return fd;
}

inline void put(const UniqueFd& fd, const std::string& bytes) {
  CHECK_EQ(send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
}

// Fewer if the other side closed.
inline std::string get(const UniqueFd& fd, size_t bytes) {
  std::string text(bytes, '\0');
  const ssize_t got = recv(fd.get(), text.data(), bytes, MSG_WAITALL);
  text.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
  return text;
}

// Closes `fd` with a reset.
inline void reset(UniqueFd& fd) {
  const linger abort{.l_onoff = 1, .l_linger = 0};
  setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &abort, sizeof(abort));
  fd.reset();
}

inline bool is_closed(const UniqueFd& fd) {
  char byte;
  ssize_t got = recv(fd.get(), &byte, 1, 0);
  return got == 0 || (got < 0 && errno != EAGAIN);
}

// The ranks of a job that are about to connect.
struct Listeners {
  Listeners(int size, const tcp::Options& options) {
    for (int rank = 0; rank < size; ++rank) add(options);
  }
  void add(const tcp::Options& options) { addresses.push_back(listeners.emplace_back(options).address()); }

  std::unique_ptr<Interhost> connect(int rank, double limit = 60, const std::function<void()>& interrupted = {}) {
    return tcp::connect(std::move(listeners[rank]), rank, addresses, Deadline::after(seconds(limit)), interrupted);
  }
  tcp::Address address_of(int rank) const { return tcp::decode_address(rank, addresses[rank]); }

  std::vector<tcp::Listener> listeners;
  std::vector<std::string> addresses;
};

// A rank of the job that is played by a test. Its own address is only a key.
class Actor {
 public:
  Actor(int rank, const tcp::Options& options) : rank_(rank), options_(options), listener_(options) {}

  std::string address() const { return listener_.address(); }

  // All connections to `server`, proved.
  std::vector<UniqueFd> join(int server, const std::string& address) {
    std::vector<UniqueFd> connections;
    for (int connection = 0; connection <= options_.sockets; ++connection)
      connections.push_back(join_one(server, address, connection));
    return connections;
  }

  UniqueFd join_one(int server, const std::string& address, int connection) {
    UniqueFd fd = dial(tcp::decode_address(server, address));
    tcp::ClientHandshake handshake = greet(server, address, connection);
    put(fd, handshake.first_words());
    put(fd, handshake.receive(get(fd, handshake.wanted())));
    handshake.receive(get(fd, handshake.wanted()));
    CHECK(handshake.result() == tcp::HandshakeResult::Fine);
    return fd;
  }

  tcp::ClientHandshake greet(int server, const std::string& address, int connection) {
    tcp::Hello hello{.connection = static_cast<uint16_t>(connection),
                     .client = static_cast<uint32_t>(rank_),
                     .server = static_cast<uint32_t>(server),
                     .nonce = tcp::random_bytes(32)};
    auto own = tcp::decode_address(rank_, listener_.address()), other = tcp::decode_address(server, address);
    return {hello, tcp::pair_keys(rank_, own, server, other, options_.secret)};
  }

 private:
  int rank_;
  tcp::Options options_;
  tcp::Listener listener_;
};

}  // namespace syncengine::testing
