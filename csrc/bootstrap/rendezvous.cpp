
#include "bootstrap/rendezvous.h"

#include <poll.h>
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/descriptors.h"
#include "base/error.h"
#include "base/sync_point.h"
#include "base/texts.h"
#include "bootstrap/fd_exchange.h"
#include "bootstrap/host.h"
#include "transport/tcp/secret.h"

namespace syncengine {

namespace {

static_assert(sizeof(Greeting) == 40 && sizeof(Challenge) == 64 && sizeof(Answer) == 32);  // no padding to sign

template <class T>
std::string_view view(const T& message) {
  return {reinterpret_cast<const char*>(&message), sizeof(message)};
}

Bytes32 proof(const std::string& secret, const char* side, const Greeting& greeting, const Bytes32& nonce) {
  std::string said = std::string(side).append(view(greeting)).append(view(nonce));
  const std::string digest = tcp::hmac_sha256(secret, said);
  Bytes32 bytes;
  std::copy(digest.begin(), digest.end(), bytes.begin());
  return bytes;
}

}  // namespace

Bytes32 random_bytes() {
  Bytes32 bytes;
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    throw_system_error("no random bytes", errno);
  return bytes;
}

Challenge challenge(const std::string& secret, const Greeting& greeting) {
  const Bytes32 nonce = random_bytes();
  return {.nonce = nonce, .proof = proof(secret, "listener", greeting, nonce)};
}

std::optional<Answer> answer(const std::string& secret, const Greeting& greeting, const Challenge& challenge) {
  if (!tcp::equal_digests(view(challenge.proof), view(proof(secret, "listener", greeting, challenge.nonce))))
    return std::nullopt;
  return Answer{.proof = proof(secret, "caller", greeting, challenge.nonce)};
}

bool proves(const std::string& secret, const Greeting& greeting, const Challenge& challenge, const Answer& answer) {
  return tcp::equal_digests(view(answer.proof), view(proof(secret, "caller", greeting, challenge.nonce)));
}

namespace {

constexpr size_t kMaxUnidentified = 64;  // at a time, beside the ranks that are still to come
constexpr int kPollMs = 50, kRetryMs = 5;

// The name's part that bootstrap/process.h understands: "syncengine-<process>-<random>".
std::string process_of(const std::string& name) {
  size_t begin = name.find('-'), end = name.rfind('-');
  return begin == std::string::npos || end <= begin ? "" : name.substr(begin + 1, end - begin - 1);
}

// Whoever fails breaks off with everybody: the dead are to blame, not those who noticed first.
[[noreturn]] void throw_lost(const RankNames& names, const std::set<int>& lost, const std::set<int>& dead) {
  if (!dead.empty()) throw Error(ErrorKind::PeerLost, names.all(dead) + " died while the ranks connected");
  throw Error(ErrorKind::PeerLost, names.all(lost) + " broke off while the ranks connected: see its own error");
}

[[noreturn]] void throw_unreachable(const RankNames& names, int rank, const std::set<int>& unreachable,
                                    const std::set<int>& dead) {
  if (!dead.empty()) throw_lost(names, unreachable, dead);
  throw Error(ErrorKind::PeerLost,
              names(rank) + " can't reach " + names.all(unreachable) +
                  " through this host's memory, though it runs on the same host: it died or broke off");
}

}  // namespace

LocalRendezvous::LocalRendezvous(int rank, std::map<int, RendezvousPoint> places, int own, const UniqueFd& listener,
                                 RankNames names)
    : rank_(rank), own_(own), names_(std::move(names)), places_(std::move(places)), listener_(listener) {
  for (const auto& [peer, place] : places_) {
    if (peer == rank) continue;
    calls_[peer];
    unserved_.insert(peer);
  }
  // For each peer the call, the peer's, and its memory.
  require_descriptors(names_(rank) + " with " + std::to_string(calls_.size()) + " peers on its host",
                      3 * calls_.size());
}

bool LocalRendezvous::has_all() const {
  return std::none_of(calls_.begin(), calls_.end(), [](const auto& call) { return call.second.misses_memory(); });
}

void LocalRendezvous::step() {
  for (auto& [peer, call] : calls_) advance(peer, call);
  accept();
  visitors_.remove_if([this](Visitor& visitor) { return advance(visitor); });
  if (unreachable_.empty() && lost_.empty()) return;
  std::map<int, std::string> processes;
  for (const auto& [peer, call] : calls_) processes[peer] = process_of(places_.at(peer).name);
  if (!unreachable_.empty()) throw_unreachable(names_, rank_, unreachable_, ended(processes));
  throw_lost(names_, lost_, ended(processes));
}

void LocalRendezvous::reach(int peer, Call& call) {
  const RendezvousPoint& place = places_.at(peer);
  switch (local_socket::call(place.name, call.socket)) {
    case local_socket::Called::NotYet: return;
    case local_socket::Called::Refused: unreachable_.insert(peer); return;
    case local_socket::Called::Connected: break;
  }
  if (!local_socket::same_user(call.socket))
    throw Error(ErrorKind::InvalidUsage, names_(peer) + " runs as another user");
  call.greeting = {.rank = rank_, .nonce = random_bytes()};
  call.stage = Call::Stage::Greeted;
  if (!local_socket::send(call.socket, &call.greeting, sizeof(call.greeting))) unreachable_.insert(peer);
}

void LocalRendezvous::advance(int peer, Call& call) {
  using local_socket::Got;
  Got got = Got::Nothing;
  if (call.stage == Call::Stage::Unreached) {
    reach(peer, call);
  } else if (call.stage == Call::Stage::Greeted) {
    Challenge challenge;
    got = local_socket::receive(call.socket, &challenge, sizeof(challenge));
    if (got == Got::Message) {
      const auto proof = answer(places_.at(peer).secret, call.greeting, challenge);
      if (!proof || !local_socket::send(call.socket, &*proof, sizeof(*proof))) got = Got::BrokenOff;
      call.stage = Call::Stage::Answered;
    }
  } else if (call.stage == Call::Stage::Answered) {
    got = local_socket::receive_fd(call.socket, peer, call.memory, names_(rank_));
    if (got == Got::Message) call.stage = Call::Stage::Received;
  } else if (call.stage == Call::Stage::Received) {
    Goodbye goodbye;
    got = local_socket::receive(call.socket, &goodbye, sizeof(goodbye));
    if (got == Got::Message) {
      call.stage = Call::Stage::Over;
      goodbye.text[sizeof(goodbye.text) - 1] = '\0';
      if (goodbye.failed) throw Error(goodbye.kind, goodbye.text);
    }
  }
  if (got == Got::BrokenOff) lost_.insert(peer);
}

void LocalRendezvous::accept() {
  for (UniqueFd socket = local_socket::accept(listener_); socket; socket = local_socket::accept(listener_)) {
    if (!local_socket::same_user(socket)) continue;
    visitors_.push_back({.socket = std::move(socket)});
    if (visitors_.size() <= unserved_.size() + kMaxUnidentified) continue;
    // The oldest of those that have said least makes room.
    visitors_.erase(std::min_element(visitors_.begin(), visitors_.end(),
                                     [](const Visitor& a, const Visitor& b) { return a.stage < b.stage; }));
  }
}

bool LocalRendezvous::advance(Visitor& visitor) {
  using local_socket::Got;
  using local_socket::Sent;
  if (visitor.stage == Visitor::Stage::Silent) {
    Greeting& greeting = visitor.greeting;
    const Got got = local_socket::receive(visitor.socket, &greeting, sizeof(greeting));
    if (got == Got::Nothing) return false;
    if (got == Got::BrokenOff || greeting.magic != Greeting{}.magic || !unserved_.contains(greeting.rank)) return true;
    visitor.challenge = challenge(places_.at(rank_).secret, greeting);
    visitor.stage = Visitor::Stage::Challenged;
    return !local_socket::send(visitor.socket, &visitor.challenge, sizeof(visitor.challenge));
  }
  const int peer = visitor.greeting.rank;
  if (visitor.stage == Visitor::Stage::Challenged) {
    Answer answer;
    const Got got = local_socket::receive(visitor.socket, &answer, sizeof(answer));
    if (got == Got::Nothing) return false;
    const bool is_rank =
        got == Got::Message && proves(places_.at(rank_).secret, visitor.greeting, visitor.challenge, answer);
    if (!is_rank) return true;
    visitor.stage = Visitor::Stage::Proved;
  }
  if (!unserved_.contains(peer)) return true;
  const Sent sent = local_socket::send_fd(visitor.socket, rank_, own_);
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

void LocalRendezvous::wait() const {
  std::vector<pollfd> waits{{listener_.get(), POLLIN, 0}};
  bool retries = false;
  for (const auto& [peer, call] : calls_) {
    if (call.stage == Call::Stage::Unreached) {
      retries = true;
    } else if (call.stage != Call::Stage::Over) {
      waits.push_back({call.socket.get(), POLLIN, 0});
    }
  }
  for (const auto& visitor : visitors_) {
    if (is_owed(visitor)) {
      retries = true;
    } else {
      waits.push_back({visitor.socket.get(), POLLIN, 0});
    }
  }
  poll(waits.data(), waits.size(), retries ? kRetryMs : kPollMs);
}

void LocalRendezvous::throw_timeout() const {
  std::set<int> missing = unserved_;
  std::string owed;
  for (const auto& [peer, call] : calls_) {
    if (call.misses_memory()) missing.insert(peer);
  }
  if (std::any_of(visitors_.begin(), visitors_.end(), is_owed))
    owed = ": the kernel passes on no more descriptors of this user than ulimit -n allows one process; raise it";
  throw Error(ErrorKind::Timeout, names_(rank_) + " waited in init() for " + names_.all(missing) + owed);
}

std::map<int, UniqueFd> LocalRendezvous::take_memories() {
  std::map<int, UniqueFd> memories;
  for (auto& [peer, call] : calls_) memories[peer] = std::move(call.memory);
  return memories;
}

}  // namespace syncengine
