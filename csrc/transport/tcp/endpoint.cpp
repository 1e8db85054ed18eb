#include "transport/tcp/endpoint.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace syncengine::tcp {

namespace {

constexpr uint64_t kAlarm = ~uint64_t{0};  // the event of alarm_
constexpr int kEvents = 64;
constexpr Duration kLongestGoodbye = std::chrono::seconds(1);

uint64_t event_key(int peer, size_t connection) { return static_cast<uint64_t>(peer) << 8 | connection; }

}  // namespace

Endpoint::Endpoint(const Options& options, int rank, std::map<int, std::vector<UniqueFd>> sockets)
    : options_(options),
      desk_(rank, [this] { wake(); }),
      epoll_(UniqueFd(epoll_create1(EPOLL_CLOEXEC))),
      alarm_(UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))) {
  if (!epoll_ || !alarm_) throw_system_error("can't make what TCP waits on", errno);
  shared_.checksum = options.checksum;
  shared_.rank = rank;
  auto watch = [&](int fd, uint32_t events, uint64_t key) {
    epoll_event event{.events = events, .data = {.u64 = key}};
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) throw_system_error("can't wait on a socket", errno);
  };
  watch(alarm_.get(), EPOLLIN, kAlarm);
  for (auto& [peer, own] : sockets) {
    auto& added = peers_[peer] = std::make_unique<Peer>(shared_, options_, peer, std::move(own));
    auto descriptors = added->descriptors();
    for (size_t i = 0; i < descriptors.size(); ++i)
      watch(descriptors[i], EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, event_key(peer, i));
  }
}

// ---- any thread ----

void Endpoint::check_peer(int peer) const {
  if (!peers_.count(peer)) throw Error(ErrorKind::InvalidUsage, rank_name(peer) + " is no peer on another host");
}

void Endpoint::wake() {
  uint64_t one = 1;
  (void)!::write(alarm_.get(), &one, sizeof(one));
}

std::shared_ptr<Interhost::Transfer> Endpoint::send(int peer, uint64_t tag, const std::byte* data, size_t bytes) {
  check_peer(peer);
  return desk_.send(peer, tag, data, bytes);
}

std::shared_ptr<Interhost::Transfer> Endpoint::receive(int peer, uint64_t tag, std::byte* data, size_t bytes) {
  check_peer(peer);
  return desk_.receive(peer, tag, data, bytes);
}

void Endpoint::tell(int peer, const std::string& message) {
  check_peer(peer);
  desk_.tell(peer, message);
}

void Endpoint::withdraw(uint64_t first, uint64_t last, const Error& error) {
  std::lock_guard turn(turn_);
  std::lock_guard lock(progress_);
  take_posts();
  shared_.withdrawn.emplace_back(first, last);
  for (auto& [rank, peer] : peers_) {
    if (peer->is_open()) peer->withdraw(first, last, error);
  }
  shared_.news = true;
  wake();
}

void Endpoint::stop() {
  stopping_ = true;
  wake();
}

bool Endpoint::has_unsent() const {
  if (desk_.has_posts()) return true;
  std::lock_guard lock(progress_);
  return std::any_of(peers_.begin(), peers_.end(),
                     [](const auto& item) { return item.second->is_open() && item.second->has_unsent(); });
}

// ---- one thread at a time ----

void Endpoint::run(const std::function<void()>& progressed) {
  for (auto last = Step::Quiet; last != Step::Over;) {
    last = step(seconds(options_.heartbeat));
    if (last != Step::Quiet) progressed();
  }
}

Interhost::Step Endpoint::step(Duration at_most) {
  epoll_event ready[kEvents];
  Duration most = busy_ ? Duration::zero() : std::min(at_most, seconds(options_.heartbeat));
  int timeout = static_cast<int>(std::chrono::ceil<std::chrono::milliseconds>(most).count());
  int count = epoll_wait(epoll_.get(), ready, kEvents, timeout);
  {
    std::lock_guard turn(turn_);
  }
  std::lock_guard lock(progress_);
  for (int i = 0; i < count; ++i) on_event(ready[i].data.u64, ready[i].events);
  bool running = pass(), news = std::exchange(shared_.news, false);
  return !running ? Step::Over : news ? Step::News : Step::Quiet;
}

void Endpoint::on_event(uint64_t key, uint32_t events) {
  if (key == kAlarm) {
    uint64_t count;
    (void)!::read(alarm_.get(), &count, sizeof(count));
    return;
  }
  Peer& peer = *peers_.at(static_cast<int>(key >> 8));
  if (peer.is_open()) peer.on_event(key & 255, events);
}

// What a peer throws ends that peer, and no other.
template <class Call>
void Endpoint::guarded(int rank, const Call& call) {
  Peer& peer = *peers_.at(rank);
  if (!peer.is_open()) return;
  try {
    call(peer);
  } catch (const Error& error) {
    fail(rank, error);
  }
}

// False when all is over.
bool Endpoint::pass() {
  take_posts();
  bool beat_due = is_beat_due();
  busy_ = false;
  for (auto& item : peers_) guarded(item.first, [](Peer& peer) { peer.speak(); });
  for (auto& item : peers_) {
    guarded(item.first, [&](Peer& peer) {
      if (beat_due) peer.beat();
      busy_ |= peer.step();
      if (beat_due) peer.look_at_clock(last_pass_);
    });
  }
  bool running = !stopping_ || !has_left();
  desk_.deliver(shared_.heard);
  return running;
}

bool Endpoint::is_beat_due() {
  auto now = Clock::now();
  // Stopped, or starved of a processor: then the peers were not heard because nobody listened.
  if (now - last_pass_ > seconds(options_.silence) / 2) {
    for (auto& [rank, peer] : peers_) peer->excuse(now);
  }
  last_pass_ = now;
  if (now < next_beat_) return false;
  next_beat_ = now + seconds(options_.heartbeat);
  return true;
}

void Endpoint::take_posts() {
  for (Desk::Post& post : desk_.take()) {
    if (!peers_.at(post.peer)->is_open()) {
      desk_.post_too_late(post);
      shared_.news = true;
      continue;
    }
    guarded(post.peer, [&](Peer& peer) {
      switch (post.kind) {
        case Desk::Post::Send: peer.outbox().post(post.tag, post.data, post.bytes, std::move(post.transfer)); break;
        case Desk::Post::Receive: peer.inbox().post(post.tag, post.data, post.bytes, std::move(post.transfer)); break;
        case Desk::Post::Tell: peer.tell(post.message); break;
      }
    });
  }
}

void Endpoint::fail(int rank, const Error& error) {
  desk_.deliver(shared_.heard);  // what it said before
  Peer& peer = *peers_.at(rank);
  // Before the transfers: who sees one fail finds the reason.
  desk_.note_failure(rank, error, peer.has_left() ? peer.inbox().take_unexpected() : Inbox::Unexpecteds());
  peer.fail(error);
}

// True when everybody has heard the goodbye, or there was time enough.
bool Endpoint::has_left() {
  Error error(ErrorKind::PeerLost, rank_name(shared_.rank) + " has left");
  auto now = Clock::now();
  if (!leaving_until_) {
    leaving_until_ = now + kLongestGoodbye;
    for (auto& [rank, peer] : peers_) {
      if (peer->is_open()) peer->take_leave(error);
    }
    busy_ = true;
    return false;
  }
  bool all = now >= *leaving_until_ || std::all_of(peers_.begin(), peers_.end(), [](const auto& item) {
               return !item.second->is_open() || item.second->gone();
             });
  if (!all) return false;
  for (auto& [rank, peer] : peers_) {
    if (peer->is_open()) fail(rank, error);
  }
  return true;
}

}  // namespace syncengine::tcp
