#include "bootstrap/fd_exchange.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <list>
#include <map>
#include <set>
#include <utility>

#include "base/checked.h"
#include "base/sync_point.h"
#include "bootstrap/host.h"
#include "transport/tcp/secret.h"

namespace syncengine::local_socket {

namespace {

constexpr int kBacklog = 128;

ParentFd open_socket() {
  ParentFd fd([] { return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
  if (!fd) throw_system_error("can't open a local socket", errno, "socket");
  return fd;
}

// Fills in an abstract address: a name behind a zero byte.
socklen_t fill(sockaddr_un& address, const std::string& name) {
  address = {};
  address.sun_family = AF_UNIX;
  size_t length = std::min(name.size(), sizeof(address.sun_path) - 1);
  std::memcpy(address.sun_path + 1, name.data(), length);
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
}

// A socket message with ancillary data that carries one descriptor.
struct DescriptorMessage {
  iovec piece;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{.msg_iov = &piece, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
};

bool must_wait(int error) { return error == EAGAIN || error == EINTR; }

}  // namespace

ParentFd listen(const std::string& name) {
  ParentFd listener = open_socket();
  sockaddr_un address;
  socklen_t length = fill(address, name);
  if (bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
      ::listen(listener.get(), kBacklog) != 0)
    throw_system_error("can't listen on a local socket", errno, "bind and listen");
  return listener;
}

Called call(const std::string& name, ParentFd& socket) {
  if (!socket) socket = open_socket();
  sockaddr_un address;
  socklen_t length = fill(address, name);
  if (connect(socket.get(), reinterpret_cast<sockaddr*>(&address), length) == 0) return Called::Connected;
  if (errno == EPERM || errno == EACCES) throw_system_error("can't connect to a rank of this host", errno, "connect");
  return must_wait(errno) ? Called::NotYet : Called::Refused;
}

ParentFd accept(const ParentFd& listener) {
  for (;;) {
    ParentFd fd([&] { return accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK); });
    if (fd || errno == EAGAIN) return fd;
    if (errno != EINTR && errno != ECONNABORTED)
      throw_system_error("can't accept a local connection", errno, "accept4");
  }
}

bool same_user(const ParentFd& socket) {
  ucred credentials{};
  socklen_t length = sizeof(credentials);
  return getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &credentials, &length) == 0 && credentials.uid == geteuid();
}

Got receive(int socket, void* message, size_t bytes) {
  ssize_t got = recv(socket, message, bytes, 0);
  if (got < 0 && must_wait(errno)) return Got::Nothing;
  return got == static_cast<ssize_t>(bytes) ? Got::Message : Got::BrokenOff;
}

bool send(int socket, const void* message, size_t bytes) {
  return ::send(socket, message, bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(bytes);
}

Sent send_fd(int socket, const void* message, size_t bytes, int fd) {
  DescriptorMessage buffers{.piece = {const_cast<void*>(message), bytes}};
  cmsghdr* header = CMSG_FIRSTHDR(&buffers.message);
  header->cmsg_level = SOL_SOCKET;
  header->cmsg_type = SCM_RIGHTS;
  header->cmsg_len = CMSG_LEN(sizeof(int));
  std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
  if (sendmsg(socket, &buffers.message, MSG_NOSIGNAL) >= 0) return Sent::Done;
  if (errno == EPIPE || errno == ECONNRESET) return Sent::BrokenOff;
  if (errno != ETOOMANYREFS && !must_wait(errno))
    throw_system_error("can't hand shared memory to a peer", errno, "sendmsg");
  char byte;  // the kernel checks that limit before it checks whether the other side still exists
  return recv(socket, &byte, 1, MSG_PEEK) == 0 ? Sent::BrokenOff : Sent::NotYet;
}

Got receive_fd(int socket, void* message, size_t bytes, UniqueFd& fd, const std::string& who) {
  DescriptorMessage buffers{.piece = {message, bytes}};
  ssize_t got = recvmsg(socket, &buffers.message, MSG_CMSG_CLOEXEC);
  if (got < 0 && must_wait(errno)) return Got::Nothing;
  cmsghdr* header = CMSG_FIRSTHDR(&buffers.message);
  if (got > 0 && header && header->cmsg_type == SCM_RIGHTS) {
    int received = -1;
    std::memcpy(&received, CMSG_DATA(header), sizeof(received));
    fd = UniqueFd(received);
  }
  if (got > 0 && !fd && (buffers.message.msg_flags & MSG_CTRUNC) != 0)
    throw_system_error(who + " can't take another descriptor", EMFILE);
  return got == static_cast<ssize_t>(bytes) && fd ? Got::Message : Got::BrokenOff;
}

}  // namespace syncengine::local_socket

namespace syncengine {

namespace {

// A rank's last message to peers that have its memory, and may still wait for other ranks: how its exchange ended.
struct Goodbye {
  int32_t failed = 0;
  uint32_t kind = 0;  // an ErrorKind
  char text[248] = {};
};

// The name under which a rank listens, and the secret that callers must say.
struct RendezvousPoint {
  std::string name, secret;
};

using local_socket::Got, local_socket::Sent;

constexpr size_t kMaxUnidentified = 64;  // at once, beyond the ranks that are still expected
constexpr int kPollMs = 50, kRetryMs = 5;

class LocalRendezvous {
 public:
  // `places` has, by rank, the names and secrets of the peers' sockets and this rank's; `own` is what to hand out.
  LocalRendezvous(int rank, std::map<int, RendezvousPoint> places, int own, const ParentFd& listener, RankNames names)
      : rank_(rank), own_(own), names_(std::move(names)), places_(std::move(places)), listener_(listener) {
    for (const auto& [peer, place] : places_) {
      if (peer == rank) continue;
      calls_[peer];
      unserved_.insert(peer);
    }
    // Each peer takes three: a socket on which this rank calls it, one on which it calls this rank, and its memory.
    require_descriptors(names_(rank) + " with " + std::to_string(calls_.size()) + " peers on its host",
                        3 * calls_.size());
  }

  // Makes what progress is possible with all peers without blocking. Throws if a peer has failed or is lost.
  void step() {
    for (auto& [peer, call] : calls_) advance(peer, call);
    accept();
    visitors_.remove_if([this](Visitor& visitor) { return advance(visitor); });
    if (unreachable_.empty() && lost_.empty()) return;
    std::map<int, std::string> processes;
    for (const auto& [peer, call] : calls_) processes[peer] = FdExchange::process_of(places_.at(peer).name);
    // Dead ranks are named before ranks that broke off: these may have failed since they noticed the death first.
    if (const auto dead = ended(processes); !dead.empty())
      throw Error(ErrorKind::PeerLost, names_.all(dead) + " died while the ranks connected");
    if (unreachable_.empty())
      throw Error(ErrorKind::PeerLost, names_.all(lost_) + " broke off while the ranks connected: see its own error");
    throw Error(ErrorKind::PeerLost,
                names_(rank_) + " can't reach " + names_.all(unreachable_) +
                    " through this host's memory, though it runs on the same host: it died or broke off");
  }

  bool over() const {
    return unserved_.empty() &&
           std::ranges::none_of(calls_, [](const auto& call) { return call.second.misses_memory(); });
  }

  // Waits until a peer may have called or sent something, for a moment at most.
  void wait() const {
    std::vector<pollfd> waits{{listener_.get(), POLLIN, 0}};
    bool retries = false;
    for (const auto& [peer, call] : calls_) {
      retries |= call.stage == Call::Stage::Unreached;
      if (call.stage == Call::Stage::Greeted || call.stage == Call::Stage::Received)
        waits.push_back({call.socket.get(), POLLIN, 0});
    }
    for (const auto& visitor : visitors_) {
      retries |= visitor.is_owed();
      if (!visitor.is_owed()) waits.push_back({visitor.socket.get(), POLLIN, 0});
    }
    poll(waits.data(), waits.size(), retries ? kRetryMs : kPollMs);
  }

  [[noreturn]] void throw_timeout() const {
    std::set<int> missing = unserved_;
    for (const auto& [peer, call] : calls_) {
      if (call.misses_memory()) missing.insert(peer);
    }
    const bool owes = std::ranges::any_of(visitors_, &Visitor::is_owed);
    throw Error(ErrorKind::Timeout,
                names_(rank_) + " waited in init() for " + names_.all(missing) +
                    (owes ? ": the kernel passes on no more descriptors of this user than ulimit -n allows one "
                            "process; raise it"
                          : ""));
  }

  // Returns the peers' descriptors, in a vector of `ranks` entries by rank. Called once over() is true.
  std::vector<UniqueFd> take_memories(size_t ranks) {
    std::vector<UniqueFd> memories(ranks);
    for (auto& [peer, call] : calls_) memories[peer] = std::move(call.memory);
    return memories;
  }

  // Sends `goodbye` to the peers that have received this rank's descriptor.
  void say_goodbye(const Goodbye& goodbye) const {
    for (const auto& peer : served_) (void)local_socket::send(peer.get(), &goodbye, sizeof(goodbye));
  }

 private:
  struct Call {
    enum class Stage : uint8_t { Unreached, Greeted, Received, Over };
    Stage stage = Stage::Unreached;
    ParentFd socket = {};
    UniqueFd memory = {};
    bool misses_memory() const { return stage < Stage::Received; }
  };
  struct Visitor {
    ParentFd socket;
    int rank = -1;  // -1 until the visitor has proved to be that rank
    bool is_owed() const { return rank >= 0; }
  };

  void advance(int peer, Call& call) {
    Got got = Got::Nothing;
    if (call.stage == Call::Stage::Unreached) {
      reach(peer, call);
    } else if (call.stage == Call::Stage::Greeted) {
      Greeting greeting;
      got = local_socket::receive_fd(call.socket.get(), &greeting, sizeof(greeting), call.memory, names_(rank_));
      if (got == Got::Message && !is_of(peer, greeting)) got = Got::BrokenOff;
      if (got == Got::Message) call.stage = Call::Stage::Received;
    } else if (call.stage == Call::Stage::Received) {
      Goodbye goodbye;
      got = local_socket::receive(call.socket.get(), &goodbye, sizeof(goodbye));
      if (got == Got::Message) {
        call.stage = Call::Stage::Over;
        const auto kind = Checked<ErrorKind>::at_most(kLastErrorKind, goodbye.kind);
        if (goodbye.failed) throw Error(kind ? kind->get() : ErrorKind::PeerLost, checked_text(goodbye.text));
      }
    }
    if (got == Got::BrokenOff) lost_.insert(peer);
  }

  void reach(int peer, Call& call) {
    switch (local_socket::call(places_.at(peer).name, call.socket)) {
      case local_socket::Called::NotYet: return;
      case local_socket::Called::Refused: unreachable_.insert(peer); return;
      case local_socket::Called::Connected: break;
    }
    if (!local_socket::same_user(call.socket))
      throw Error(ErrorKind::InvalidUsage,
                  names_(peer) +
                      " runs as another user: start all ranks of a host as one, or give the ranks of each user a "
                      "SYNCENGINE_HOST_ID of their own");
    call.stage = Call::Stage::Greeted;
    const Greeting greeting = greeting_to(peer);
    if (!local_socket::send(call.socket.get(), &greeting, sizeof(greeting))) unreachable_.insert(peer);
  }

  void accept() {
    for (ParentFd socket = local_socket::accept(listener_); socket; socket = local_socket::accept(listener_)) {
      if (!local_socket::same_user(socket)) continue;
      visitors_.push_back({.socket = std::move(socket)});
      if (visitors_.size() <= unserved_.size() + kMaxUnidentified) continue;
      // Too many visitors: the oldest that has said nothing is dropped, or this one if all have proved to be ranks.
      const auto silent = std::ranges::find_if_not(visitors_, &Visitor::is_owed);
      visitors_.erase(silent != visitors_.end() ? silent : std::prev(silent));
    }
  }

  // Goes on with a visitor. Returns true when the visitor is done with: it has been served, is lost, or is no rank.
  bool advance(Visitor& visitor) {
    if (!visitor.is_owed()) {
      Greeting greeting;
      const Got got = local_socket::receive(visitor.socket.get(), &greeting, sizeof(greeting));
      if (got == Got::Nothing) return false;
      if (got == Got::BrokenOff || !unserved_.contains(greeting.rank) || !is_of(greeting.rank, greeting)) return true;
      visitor.rank = greeting.rank;
    }
    const int peer = visitor.rank;
    if (!unserved_.contains(peer)) return true;
    const Greeting greeting = greeting_to(peer);
    const Sent sent = local_socket::send_fd(visitor.socket.get(), &greeting, sizeof(greeting), own_);
    if (sent == Sent::NotYet) return false;
    if (sent == Sent::Done) {
      unserved_.erase(peer);
      served_.push_back(std::move(visitor.socket));
      sync_point("handed");
    } else {
      lost_.insert(peer);
    }
    return true;
  }

  Greeting greeting_to(int peer) const {
    Greeting greeting{.rank = rank_};
    places_.at(peer).secret.copy(greeting.secret.data(), greeting.secret.size());
    return greeting;
  }

  // Whether `greeting` comes from rank `peer` and says this rank's secret.
  bool is_of(int peer, const Greeting& greeting) const {
    return greeting.magic == Greeting{}.magic && greeting.rank == peer &&
           tcp::equal_digests({greeting.secret.data(), greeting.secret.size()}, places_.at(rank_).secret);
  }

  const int rank_, own_;
  const RankNames names_;
  const std::map<int, RendezvousPoint> places_;
  const ParentFd& listener_;
  std::map<int, Call> calls_;
  std::list<Visitor> visitors_;  // the oldest first
  std::set<int> unserved_, unreachable_, lost_;
  std::vector<ParentFd> served_;  // sockets of the peers that have received this rank's descriptor
};

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
  return {.name = address.substr(0, slash), .secret = slash == std::string::npos ? "" : address.substr(slash + 1)};
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

// An address begins with "syncengine-<process>-<random>", where <process> is a process_id().
std::string FdExchange::process_of(const std::string& address) {
  const std::string name = parse(address).name;
  size_t begin = name.find('-'), end = name.rfind('-');
  return begin == std::string::npos || end <= begin ? "" : name.substr(begin + 1, end - begin - 1);
}

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
    sync_point("connecting");  // nobody has this rank's memory yet
    while (!rendezvous.over()) {
      rendezvous.step();
      if (rendezvous.over()) break;
      if (deadline.passed()) rendezvous.throw_timeout();
      rendezvous.wait();
      if (interrupted) interrupted();
    }
    listener_.reset();
    rendezvous.say_goodbye(Goodbye{});
  } catch (...) {
    const Error told = for_peers(names(rank), std::current_exception());
    Goodbye goodbye{.failed = 1, .kind = static_cast<uint32_t>(told.kind())};
    std::string(told.what()).copy(goodbye.text, sizeof(goodbye.text) - 1);
    rendezvous.say_goodbye(goodbye);
    throw;
  }
  return rendezvous.take_memories(addresses.size());
}

}  // namespace syncengine
