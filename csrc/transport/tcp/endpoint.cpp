#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "base/descriptors.h"
#include "base/say.h"
#include "transport/matching/endpoint.h"
#include "transport/tcp/peer.h"
#include "transport/tcp/rendezvous.h"
#include "transport/tcp/secret.h"
#include "transport/tcp/socket.h"
#include "transport/tcp/tcp.h"

namespace syncengine::tcp {

// An Interhost over TCP: one thread at a time, in step(), moves everything. It sleeps in epoll, and calls from other
// threads wake it.
//
// Locks: as in matching::Endpoint. A pass makes at most one system call each way on each data connection.

class Endpoint : public matching::Endpoint<Peer> {
 public:
  // `sockets` are by peer: the first for control, the others for data. `listener` stays open: see probe.h.
  Endpoint(const Options& options, int rank, const Ip& own, const std::map<int, Address>& peers,
           std::map<int, Sockets> sockets, ParentFd listener);

  void run(const std::function<void()>&) override {}  // nobody calls this, as there are steps
  bool has_steps() const override { return true; }
  bool knows_ends() const override { return true; }
  Step step(Duration at_most) override;
  void wake() override;
  bool has_unsent() const override;

 private:
  // Called by the thread that makes the step, under the progress lock. A key is a peer << 8 | connection, or kAlarm.
  void on_event(uint64_t key, uint32_t events);
  bool pass();

  ParentFd listener_;
  ParentFd epoll_;
  ParentFd alarm_;
  bool busy_ = true;  // another pass may have more to do at once
};

Endpoint::Endpoint(const Options& options, int rank, const Ip& own, const std::map<int, Address>& peers,
                   std::map<int, Sockets> sockets, ParentFd listener)
    : matching::Endpoint<Peer>(rank, options.names, options.checksum, options.timing),
      listener_(std::move(listener)),
      epoll_([] { return epoll_create1(EPOLL_CLOEXEC); }),
      alarm_([] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); }) {
  if (!epoll_ || !alarm_)
    throw_system_error("can't make what TCP waits on", errno, epoll_ ? "eventfd2" : "epoll_create1");
  auto watch = [&](int fd, uint32_t events, uint64_t key) {
    epoll_event event{.events = events, .data = {.u64 = key}};
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
      throw_system_error("can't wait on a socket", errno, "epoll_ctl");
  };
  watch(alarm_.get(), EPOLLIN, kAlarm);
  for (auto& [peer, its] : sockets) {
    for (size_t i = 0; i < its.size(); ++i)
      watch(its[i].get(), EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, static_cast<uint64_t>(peer) << 8 | i);
    Probe probe(own, peers.at(peer).ip, peers.at(peer).port);
    peers_[peer] = std::make_unique<Peer>(shared_, options, peer, std::move(probe), std::move(its));
  }
}

// ---- any thread ----

void Endpoint::wake() {
  uint64_t one = 1;
  (void)!::write(alarm_.get(), &one, sizeof(one));
}

bool Endpoint::has_unsent() const {
  if (has_posts()) return true;
  std::lock_guard lock(progress_);
  return std::any_of(peers_.begin(), peers_.end(), [](const auto& item) {
    return !item.second->session().life.is_broken() && item.second->has_unsent();
  });
}

// ---- one thread at a time ----

Interhost::Step Endpoint::step(Duration at_most) {
  constexpr int kEvents = 64;
  epoll_event ready[kEvents];
  Duration most = busy_ ? Duration::zero() : std::min(at_most, heartbeat_);
  int timeout = static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(most).count());
  int count = epoll_wait(epoll_.get(), ready, kEvents, timeout);
  let_others_in();
  std::string log;
  bool running, news;
  {
    std::lock_guard lock(progress_);
    for (int i = 0; i < count; ++i) on_event(ready[i].data.u64, ready[i].events);
    running = pass();
    news = std::exchange(shared_.news, false);
    log.swap(shared_.log);
  }
  if (!log.empty()) say(std::move(log));
  return !running ? Step::Over : news ? Step::News : Step::Quiet;
}

void Endpoint::on_event(uint64_t key, uint32_t events) {
  if (key == kAlarm) {
    uint64_t count;
    (void)!::read(alarm_.get(), &count, sizeof(count));
    return;
  }
  Peer& peer = *peers_.at(static_cast<int>(key >> 8));
  if (!peer.session().life.is_broken()) peer.on_event(key & 255, events);
}

// Makes one pass; returns false when all peers are done with.
bool Endpoint::pass() {
  take_posts();
  bool beat_due = is_beat_due();
  busy_ = false;
  for_each_unbroken([](Peer& peer) { peer.speak(); });
  for_each_unbroken([&](Peer& peer) {
    if (beat_due) peer.beat();
    busy_ |= peer.step();
    if (beat_due) peer.look_at_clock(last_pass_);
  });
  // Accepts and drops new connections. A rank that has lost this one connects only to see whether Linux accepts, and
  // the listener's queue must have room for the next one.
  constexpr int kDismissed = 64;
  for (int i = 0; beat_due && i < kDismissed && accept_on(listener_.get()); ++i) continue;
  for (auto& [rank, peer] : peers_)
    if (peer->has_just_ended(epoll_.get())) note_end(rank);
  busy_ |= stopping_ && !is_leaving();  // a goodbye is to be sent soon
  bool running = !stopping_ || !has_left() ||
                 std::any_of(peers_.begin(), peers_.end(), [](const auto& item) { return item.second->is_missed(); });
  deliver(shared_.heard);
  return running;
}

Listener::Listener(const Options& options) : options_(options) {
  if (options.sockets < 1 || options.sockets > kMaxSockets) {
    throw Error(ErrorKind::InvalidUsage, "there must be 1 to " + std::to_string(kMaxSockets) +
                                             " TCP sockets a peer, not " + std::to_string(options.sockets));
  }
  if (const auto& timing = options.timing; timing.heartbeat <= 0 || timing.silence < 3 * timing.heartbeat) {
    throw Error(ErrorKind::InvalidUsage,
                "a silence of " + std::to_string(timing.silence) + " s can't be told from heartbeats every " +
                    std::to_string(timing.heartbeat) + " s: give at least three times as much");
  }
  address_.ip = choose_ip(options.interface, local_interfaces());
  fd_ = listen_on(address_.ip);
  address_.port = port_of(fd_);
  address_.has_secret = !options.secret.empty();
  address_.network = sha256(options.network);
  address_.key = random_bytes(address_.network.size());
}

std::unique_ptr<Interhost> connect(Listener listener, int rank, const std::vector<std::string>& addresses,
                                   Deadline deadline, const std::function<void()>& interrupted) {
  std::map<int, Address> peers;
  for (int peer = 0; peer < static_cast<int>(addresses.size()); ++peer) {
    if (peer == rank || addresses[peer].empty()) continue;
    const RankNames& names = listener.options_.names;
    peers[peer] = decode_address(names.global(peer), addresses[peer]);
    check_fit(names.global(rank), listener.address_, names.global(peer), peers[peer]);
  }
  constexpr size_t kOwn = 3;     // the listener, and the descriptors on which the endpoint waits
  constexpr size_t kSpare = 16;  // for descriptors that the process opens meanwhile
  const size_t each = 1 + listener.options_.sockets;
  require_descriptors("this rank, with connections to " + std::to_string(peers.size()) + " ranks of other hosts, " +
                          std::to_string(each) + " each (fewer by init(sockets=...)),",
                      peers.size() * each + kOwn + kSpare);
  Rendezvous rendezvous(listener.options_, rank, listener.address_, peers, listener.fd_.get());
  auto sockets = rendezvous.run(deadline, interrupted);
  return std::make_unique<Endpoint>(listener.options_, rank, listener.address_.ip, peers, std::move(sockets),
                                    std::move(listener.fd_));
}

}  // namespace syncengine::tcp
