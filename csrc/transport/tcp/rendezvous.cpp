#include "transport/tcp/rendezvous.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/checked.h"
#include "base/say.h"
#include "base/sync_point.h"
#include "base/texts.h"
#include "transport/tcp/socket.h"

namespace syncengine::tcp {

Rendezvous::Rendezvous(const Options& options, int rank, const Address& own, std::map<int, Address> peers, int listener)
    : options_(options), rank_(rank), own_(own), peers_(std::move(peers)), listener_(listener) {
  for (const auto& [peer, address] : peers_) {
    keys_[peer] = pair_keys(rank, own, peer, address, options.secret);
    sockets_[peer].resize(1 + options.sockets);
    missing_ += sockets_[peer].size();
    if (peer > rank) continue;
    for (int connection = 0; connection <= options.sockets; ++connection)
      calls_.push_back({.peer = peer, .connection = connection});
  }
}

std::map<int, Sockets> Rendezvous::run(Deadline deadline, const std::function<void()>& interrupted) {
  sync_point("tcp_rendezvous");
  const auto begin = Clock::now();
  bool logged = false;
  while (missing_ > 0) {
    // Without room for a caller the listener is not polled: poll() would return at once, again and again.
    std::vector<pollfd> waits{{has_room() ? listener_ : -1, POLLIN, 0}};
    for (const Call& call : calls_) {
      if (call.fd) waits.push_back({call.fd.get(), static_cast<short>(call.connecting ? POLLOUT : POLLIN), 0});
    }
    for (const Call& call : unauthenticated_) waits.push_back({call.fd.get(), POLLIN, 0});
    size_t first_open = waits.size();
    std::vector<int> owners;
    for (const auto& [peer, sockets] : sockets_) {
      for (const ParentFd& socket : sockets) {
        if (!socket) continue;
        waits.push_back({socket.get(), POLLRDHUP, 0});
        owners.push_back(peer);
      }
    }
    constexpr int kPollMs = 50;
    poll(waits.data(), waits.size(), kPollMs);
    if (interrupted) interrupted();
    for (size_t i = 0; i < owners.size(); ++i) {
      if (waits[first_open + i].revents)
        throw Error(ErrorKind::PeerLost,
                    options_.names(owners[i]) + " broke off while the ranks connected: see its own error");
    }
    accept_callers();
    for (auto* calls : {&calls_, &unauthenticated_}) {
      calls->remove_if([&](Call& call) { return advance(call); });
    }
    if (missing_ > 0 && deadline.passed())
      throw Error(ErrorKind::Timeout, options_.names(rank_) + " waited in init() for " + missing_names());
    if (missing_ > 0 && Clock::now() - begin >= seconds(options_.log_after) && !std::exchange(logged, true))
      say("syncengine: " + options_.names(rank_) + " still waits in init() for " + missing_names() + "\n");
  }
  return std::move(sockets_);
}

std::list<Rendezvous::Call>::iterator Rendezvous::oldest_silent() {
  return std::find_if(unauthenticated_.begin(), unauthenticated_.end(),
                      [](const Call& call) { return !call.server->has_ticket(); });
}

bool Rendezvous::is_full() const {
  return unauthenticated_.size() >= missing_ + static_cast<size_t>(options_.unauthenticated);
}

void Rendezvous::accept_callers() {
  while (has_room()) {
    const auto oldest = oldest_silent();
    const bool full = is_full();
    ParentFd fd = accept_on(listener_);
    const bool is_short = !fd && (errno == EMFILE || errno == ENFILE);
    const bool is_refused = !fd && (errno == EPERM || errno == EACCES || errno == ENOSYS);
    if (is_refused && peers_.rbegin()->first < rank_) return;  // nobody calls this rank
    if (is_refused || (is_short && oldest == unauthenticated_.end()))
      throw_system_error(options_.names(rank_) + " can't accept the connections of " + missing_names(), errno,
                         "accept4");
    if (!fd && !is_short) return;
    // Drops the caller that has been silent longest; a rank calls again.
    if (full || is_short) unauthenticated_.erase(oldest);
    if (is_short) continue;
    Call& call = unauthenticated_.emplace_back();
    call.fd = std::move(fd);
    call.limit = Clock::now() + seconds(options_.handshake);
    call.server = std::make_unique<ServerHandshake>(
        random_bytes(kDigestBytes), [this](const Hello& hello) -> std::optional<PairKeys> {
          auto client = static_cast<int>(hello.client);
          bool expected = hello.server == static_cast<uint32_t>(rank_) && client > rank_ && keys_.count(client) &&
                          hello.connection < sockets_[client].size() && !nonces_.count(hello.nonce);
          return expected ? std::optional(keys_[client]) : std::nullopt;
        });
  }
}

bool Rendezvous::break_off(Call& call, int code) {
  if (code == ECONNREFUSED) {
    throw Error(ErrorKind::PeerLost, options_.names(call.peer) + " refused the connection from " +
                                         options_.names(rank_) + " (" + where(call.peer) +
                                         "): its process ended or its init() failed (see its own error), or a "
                                         "firewall stands between");
  }
  return try_again(call, code ? std::strerror(code) : "closed by the other side");
}

bool Rendezvous::try_again(Call& call, const std::string& why) {
  constexpr Duration kPause = std::chrono::milliseconds(50);
  reasons_[call.peer] = where(call.peer) + ": " + why;
  call.fd.reset();
  call.again = Clock::now() + kPause;
  return false;
}

bool Rendezvous::advance(Call& call) {
  if (!call.fd) {
    if (Clock::now() < call.again) return false;
    const Address& address = peers_.at(call.peer);
    call.fd = begin_connect(own_.ip, address.ip, address.port);
    call.connecting = true;
    call.read.clear();
    if (!call.fd) return break_off(call, errno);
  }
  if (call.connecting) {
    if (!is_decided(call.fd)) return false;
    if (int code = connect_error(call.fd)) return break_off(call, code);
    greet(call);
  }
  const std::optional<int> code = talk(call);
  if (!code) return settle(call);
  const bool broken = *code != EAGAIN;
  if (call.client) return broken && break_off(call, *code);
  return broken || Clock::now() >= call.limit;
}

void Rendezvous::greet(Call& call) {
  Hello hello{.connection = static_cast<uint16_t>(call.connection),
              .client = static_cast<uint32_t>(rank_),
              .server = static_cast<uint32_t>(call.peer),
              .nonce = random_bytes(kDigestBytes)};
  call.connecting = false;
  call.client = std::make_unique<ClientHandshake>(hello, keys_.at(call.peer));
  const std::string& words = call.client->first_words();
  (void)!send(call.fd.get(), words.data(), words.size(), MSG_NOSIGNAL);  // always fits into an empty queue; an error
                                                                         // shows at the next read
}

// Returns nothing when the handshake is over, else why not: EAGAIN means not yet, 0 that the other side has closed.
std::optional<int> Rendezvous::talk(Call& call) {
  Handshake& handshake = call.handshake();
  while (handshake.wanted() > 0) {
    // Never reads beyond the handshake: what follows is for the connection's next owner.
    char buffer[256];
    ssize_t got = recv(call.fd.get(), buffer, handshake.wanted() - call.read.size(), 0);
    if (got <= 0) return got == 0 ? 0 : errno == EINTR ? EAGAIN : errno;
    call.read.append(buffer, got);
    if (call.read.size() < handshake.wanted()) continue;
    const std::string message = std::exchange(call.read, {});
    std::string reply = call.client ? call.client->receive(message) : call.server->receive(message);
    if (call.server && call.server->has_ticket()) nonces_.insert(handshake.hello().nonce);
    if (!reply.empty() && send(call.fd.get(), reply.data(), reply.size(), MSG_NOSIGNAL) < 0)
      return errno == EAGAIN ? EPIPE : errno;
  }
  return {};
}

bool Rendezvous::settle(Call& call) {
  const Handshake& handshake = call.handshake();
  const int peer = call.client ? call.peer : static_cast<int>(handshake.hello().client);
  if (handshake.result() == HandshakeResult::Fine) {
    ParentFd& place = sockets_.at(peer)[handshake.hello().connection];
    if (!place) --missing_;
    place = std::move(call.fd);  // a second call: the first broke off without this side's noticing
    return true;
  }
  const bool lacks_proof = handshake.result() == HandshakeResult::Secret;
  if (call.server) {
    if (lacks_proof) doubt(peer);
    return true;  // the caller is no rank of this job
  }
  if (lacks_proof && !options_.secret.empty())
    throw Error(ErrorKind::InvalidUsage, options_.names(peer) + " and " + options_.names(rank_) +
                                             " have different secrets: set SYNCENGINE_SECRET (or what is in "
                                             "SYNCENGINE_SECRET_FILE) to the same on all ranks");
  return try_again(call,
                   lacks_proof ? "its part of the handshake" + std::string(kDamaged) : "something else answers there");
}

// Notes a caller with a rank's name and a valid ticket, but no proof. Either the rank has another secret, which its own
// init() says; or a stranger has read the addresses in the launcher's exchange. A stranger must not end the job, so
// this rank keeps waiting for the real one.
void Rendezvous::doubt(int peer) {
  const bool has_secret = !options_.secret.empty();
  const std::string text = "somebody called as " + options_.names(peer) +
                           (has_secret ? " with another secret than this job's" : ", and could not prove it");
  reasons_[peer] = text;
  if (!doubted_.insert(peer).second) return;
  say("syncengine: " + options_.names(rank_) + ": " + text + ", and was turned away: it is that rank " +
      (has_secret ? "with a wrong SYNCENGINE_SECRET" : "and bytes were changed on the way") +
      ", or a stranger who has read the addresses\n");
}

std::string Rendezvous::missing_names() const {
  std::string names;
  int count = 0;
  for (const auto& [peer, sockets] : sockets_) {
    if (std::all_of(sockets.begin(), sockets.end(), [](const ParentFd& fd) { return static_cast<bool>(fd); })) continue;
    auto reason = reasons_.find(peer);
    names += (names.empty() ? "" : ", ") + std::to_string(options_.names.global(peer));
    if (reason != reasons_.end())
      names += " (" + reason->second + ")";
    else if (peer < rank_)
      names += " (" + where(peer) + " does not answer)";
    ++count;
  }
  return (count == 1 ? "rank " : "ranks ") + names;
}

}  // namespace syncengine::tcp
