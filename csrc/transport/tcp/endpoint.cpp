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

uint64_t event_key(int peer, size_t connection) { return static_cast<uint64_t>(peer) << 8 | connection; }

}  // namespace

Endpoint::Endpoint(const Options& options, int rank, std::map<int, std::vector<UniqueFd>> sockets)
    : matching::Endpoint<Peer>(rank, options.names, options.checksum, heartbeat_timing(options)),
      options_(options),
      epoll_(UniqueFd(epoll_create1(EPOLL_CLOEXEC))),
      alarm_(UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))) {
  if (!epoll_ || !alarm_) throw_system_error("can't make what TCP waits on", errno);
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

void Endpoint::wake() {
  uint64_t one = 1;
  (void)!::write(alarm_.get(), &one, sizeof(one));
}

bool Endpoint::has_unsent() const {
  if (queue_.has_posts()) return true;
  std::lock_guard lock(progress_);
  return std::any_of(peers_.begin(), peers_.end(), [](const auto& item) {
    return !item.second->session().life.is_broken() && item.second->has_unsent();
  });
}

// ---- one thread at a time ----

void Endpoint::run(const std::function<void()>& progressed) {
  for (auto last = Step::Quiet; last != Step::Over;) {
    last = step(heartbeat_);
    if (last != Step::Quiet) progressed();
  }
}

Interhost::Step Endpoint::step(Duration at_most) {
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
  print(log);
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

// False when all is over.
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
  busy_ |= stopping_ && !is_leaving();  // there will be a goodbye to send
  bool running = !stopping_ || !has_left();
  queue_.deliver(shared_.heard);
  return running;
}

}  // namespace syncengine::tcp
