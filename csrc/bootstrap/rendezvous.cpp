
#include "bootstrap/rendezvous.h"

#include <poll.h>

#include <algorithm>
#include <functional>
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

constexpr size_t kMaxUnidentified = 64;  // at a time, beside the ranks that are still to come
constexpr int kPollMs = 50, kRetryMs = 5;

// The name's part that bootstrap/host.h understands: "syncengine-<process>-<random>".
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

Greeting LocalRendezvous::greeting_to(int peer) const {
  Greeting greeting{.rank = rank_};
  places_.at(peer).secret.copy(greeting.secret.data(), greeting.secret.size());
  return greeting;
}

bool LocalRendezvous::is_of(int peer, const Greeting& greeting) const {
  return greeting.magic == Greeting{}.magic && greeting.rank == peer &&
         tcp::equal_digests({greeting.secret.data(), greeting.secret.size()}, places_.at(rank_).secret);
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
  call.stage = Call::Stage::Greeted;
  const Greeting greeting = greeting_to(peer);
  if (!local_socket::send(call.socket, &greeting, sizeof(greeting))) unreachable_.insert(peer);
}

void LocalRendezvous::advance(int peer, Call& call) {
  using local_socket::Got;
  Got got = Got::Nothing;
  if (call.stage == Call::Stage::Unreached) {
    reach(peer, call);
  } else if (call.stage == Call::Stage::Greeted) {
    Greeting greeting;
    got = local_socket::receive_fd(call.socket, &greeting, sizeof(greeting), call.memory, names_(rank_));
    if (got == Got::Message && !is_of(peer, greeting)) got = Got::BrokenOff;
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
    // The oldest that has said nothing makes room.
    visitors_.erase(std::find_if_not(visitors_.begin(), visitors_.end(), std::mem_fn(&Visitor::is_owed)));
  }
}

bool LocalRendezvous::advance(Visitor& visitor) {
  using local_socket::Got;
  using local_socket::Sent;
  if (!visitor.is_owed()) {
    Greeting greeting;
    const Got got = local_socket::receive(visitor.socket, &greeting, sizeof(greeting));
    if (got == Got::Nothing) return false;
    if (got == Got::BrokenOff || !unserved_.contains(greeting.rank) || !is_of(greeting.rank, greeting)) return true;
    visitor.rank = greeting.rank;
  }
  const int peer = visitor.rank;
  if (!unserved_.contains(peer)) return true;
  const Greeting greeting = greeting_to(peer);
  const Sent sent = local_socket::send_fd(visitor.socket, &greeting, sizeof(greeting), own_);
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
    if (visitor.is_owed()) {
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
  if (std::any_of(visitors_.begin(), visitors_.end(), std::mem_fn(&Visitor::is_owed)))
    owed = ": the kernel passes on no more descriptors of this user than ulimit -n allows one process; raise it";
  throw Error(ErrorKind::Timeout, names_(rank_) + " waited in init() for " + names_.all(missing) + owed);
}

std::map<int, UniqueFd> LocalRendezvous::take_memories() {
  std::map<int, UniqueFd> memories;
  for (auto& [peer, call] : calls_) memories[peer] = std::move(call.memory);
  return memories;
}

}  // namespace syncengine
