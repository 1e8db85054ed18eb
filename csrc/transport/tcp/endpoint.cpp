#include "transport/tcp/endpoint.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

namespace syncengine::tcp {

namespace {

constexpr uint64_t kAlarm = ~uint64_t{0};  // the event of alarm_
constexpr int kEvents = 64;
constexpr Duration kLongestGoodbye = std::chrono::seconds(1);

uint64_t event_key(int peer, size_t connection) { return static_cast<uint64_t>(peer) << 8 | connection; }

}  // namespace

Endpoint::Endpoint(const Options& options, int rank, std::map<int, std::vector<UniqueFd>> sockets)
    : epoll_(UniqueFd(epoll_create1(EPOLL_CLOEXEC))), alarm_(UniqueFd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))) {
  if (!epoll_ || !alarm_) throw_system_error("can't make what TCP waits on", errno);
  shared_.options = options;
  shared_.rank = rank;
  auto watch = [&](int fd, uint32_t events, uint64_t key) {
    epoll_event event{.events = events, .data = {.u64 = key}};
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) throw_system_error("can't wait on a socket", errno);
  };
  watch(alarm_.get(), EPOLLIN, kAlarm);
  for (auto& [peer, own] : sockets) {
    auto& added = peers_[peer] = std::make_unique<Peer>(shared_, peer, std::move(own));
    auto descriptors = added->descriptors();
    for (size_t i = 0; i < descriptors.size(); ++i)
      watch(descriptors[i], EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, event_key(peer, i));
  }
}

// ---- any thread ----

void Endpoint::check_peer(int peer) const {
  if (!peers_.count(peer)) throw Error(ErrorKind::InvalidUsage, rank_name(peer) + " is no peer on another host");
}

void Endpoint::wake() const {
  uint64_t one = 1;
  (void)!::write(alarm_.get(), &one, sizeof(one));
}

std::shared_ptr<Interhost::Transfer> Endpoint::post(Post post) {
  check_peer(post.peer);
  if (post.bytes > kMaxTransfer)
    throw Error(ErrorKind::InvalidUsage, "a transfer has at most 1 MiB, this one " + std::to_string(post.bytes));
  auto transfer = post.transfer;
  bool first;
  {
    std::lock_guard lock(posts_mutex_);
    if (failures_.contains(post.peer)) {
      post_too_late(post);
      return transfer;
    }
    first = posts_.empty();
    posts_.push_back(std::move(post));
  }
  if (first) wake();
  return transfer;
}

// Its peer has failed, or has left: then what it sent before is still there. Under posts_mutex_.
void Endpoint::post_too_late(Post& post) {
  if (!post.transfer) return;
  auto peers = left_behind_.find(post.peer);
  if (post.kind == Post::Receive && peers != left_behind_.end()) {
    if (auto found = peers->second.extract(post.tag)) {
      const auto& sent = found.mapped();
      if (sent.size != post.bytes)
        return post.transfer->fail(
            size_mismatch(post.peer, sent.size, shared_.rank, static_cast<uint32_t>(post.bytes)));
      if (post.bytes > 0) std::memcpy(post.data, sent.bytes.get(), post.bytes);
      return post.transfer->finish();
    }
  }
  post.transfer->fail(failures_.at(post.peer));
}

std::shared_ptr<Interhost::Transfer> Endpoint::send(int peer, uint64_t tag, const std::byte* data, size_t bytes) {
  return post({Post::Send, peer, tag, const_cast<std::byte*>(data), bytes, std::make_shared<Transfer>(), {}});
}

std::shared_ptr<Interhost::Transfer> Endpoint::receive(int peer, uint64_t tag, std::byte* data, size_t bytes) {
  return post({Post::Receive, peer, tag, data, bytes, std::make_shared<Transfer>(), {}});
}

void Endpoint::tell(int peer, const std::string& message) {
  if (message.size() > kMaxMessage)
    throw Error(ErrorKind::InvalidUsage, "a message has at most 64 KiB, this one " + std::to_string(message.size()));
  post({Post::Tell, peer, 0, nullptr, 0, nullptr, message});
}

std::optional<Interhost::Message> Endpoint::hear() {
  std::lock_guard lock(posts_mutex_);
  if (heard_.empty()) return {};
  Message message = std::move(heard_.front());
  heard_.pop_front();
  return message;
}

std::optional<Error> Endpoint::failure(int peer) const {
  std::lock_guard lock(posts_mutex_);
  auto found = failures_.find(peer);
  return found == failures_.end() ? std::nullopt : std::optional(found->second);
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

// ---- the thread that runs ----

void Endpoint::run(const std::function<void()>& progressed) {
  epoll_event ready[kEvents];
  for (bool running = true; running;) {
    int timeout = busy_ ? 0 : static_cast<int>(seconds(shared_.options.heartbeat) / std::chrono::milliseconds(1));
    int count = epoll_wait(epoll_.get(), ready, kEvents, std::max(timeout, busy_ ? 0 : 1));
    bool news;
    {
      std::lock_guard turn(turn_);
    }
    {
      std::lock_guard lock(progress_);
      for (int i = 0; i < count; ++i) on_event(ready[i].data.u64, ready[i].events);
      running = pass();
      news = std::exchange(shared_.news, false);
    }
    if (news) progressed();
  }
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
  for (auto& item : peers_) {
    guarded(item.first, [&](Peer& peer) {
      if (beat_due) peer.beat();
      busy_ |= peer.step();
      if (beat_due) peer.look_at_clock(last_pass_);
    });
  }
  bool running = !stopping_ || !has_left();
  deliver();
  return running;
}

bool Endpoint::is_beat_due() {
  auto now = Clock::now();
  const Options& options = shared_.options;
  // Stopped, or starved of a processor: then the peers were not heard because nobody listened.
  if (now - last_pass_ > seconds(options.silence) / 2) {
    for (auto& [rank, peer] : peers_) peer->excuse(now);
  }
  last_pass_ = now;
  if (now < next_beat_) return false;
  next_beat_ = now + seconds(options.heartbeat);
  return true;
}

void Endpoint::take_posts() {
  std::deque<Post> posts;
  {
    std::lock_guard lock(posts_mutex_);
    posts.swap(posts_);
  }
  for (Post& post : posts) {
    if (!peers_.at(post.peer)->is_open()) {
      std::lock_guard lock(posts_mutex_);
      post_too_late(post);
      shared_.news = true;
      continue;
    }
    guarded(post.peer, [&](Peer& peer) {
      switch (post.kind) {
        case Post::Send: peer.outbox().post(post.tag, post.data, post.bytes, std::move(post.transfer)); break;
        case Post::Receive: peer.inbox().post(post.tag, post.data, post.bytes, std::move(post.transfer)); break;
        case Post::Tell: peer.tell(post.message); break;
      }
    });
  }
}

void Endpoint::fail(int rank, const Error& error) {
  deliver();  // what it said before
  Peer& peer = *peers_.at(rank);
  {
    std::lock_guard lock(posts_mutex_);
    failures_.emplace(rank, error);  // before the transfers: who sees one fail finds the reason
    if (peer.has_left()) left_behind_.emplace(rank, peer.inbox().take_unexpected());
  }
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

void Endpoint::deliver() {
  if (shared_.heard.empty()) return;
  std::lock_guard lock(posts_mutex_);
  std::move(shared_.heard.begin(), shared_.heard.end(), std::back_inserter(heard_));
  shared_.heard.clear();
}

}  // namespace syncengine::tcp
