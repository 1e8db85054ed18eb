#include "transport/packets/endpoint.h"

#include <algorithm>
#include <utility>

namespace syncengine::packets {

using matching::Desk, matching::rank_name;

namespace {

constexpr Duration kLongestGoodbye = std::chrono::seconds(1);
constexpr Duration kShortestPause = std::chrono::microseconds(20), kLongestPause = std::chrono::milliseconds(5);
constexpr int kPatience =
    8;  // a pause is this part of the time in which nothing has moved: polling adds so much to a wait

}  // namespace

std::unique_ptr<Interhost> connect(std::unique_ptr<Mover> mover, const Options& options, int rank,
                                   const std::vector<int>& peers) {
  return std::make_unique<Endpoint>(std::move(mover), options, rank, peers);
}

Endpoint::Endpoint(std::unique_ptr<Mover> mover, const Options& options, int rank, const std::vector<int>& peers)
    : options_(options), desk_(rank, [this] { wake(); }), mover_(std::move(mover)) {
  shared_.rank = rank;
  shared_.checksum = options.checksum;
  for (int peer : peers) peers_[peer] = std::make_unique<Peer>(shared_, traffic_, options_, peer);
}

// ---- any thread ----

void Endpoint::check_peer(int peer) const {
  if (!peers_.count(peer)) throw Error(ErrorKind::InvalidUsage, rank_name(peer) + " is no peer on another host");
}

void Endpoint::wake() {
  std::lock_guard lock(sleep_mutex_);
  woken_ = true;
  sleep_.notify_one();
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

// What of it is under way lies in the endpoint's own memory.
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
  polled_ = !mover_->start([this] { wake(); });
  for (bool running = true; running;) {
    std::vector<Mover::Packet> posts;
    bool news;
    {
      std::lock_guard turn(turn_);
    }
    {
      std::lock_guard lock(progress_);
      running = pass();
      posts = traffic_.posted();
      news = std::exchange(shared_.news, false);
    }
    if (news) progressed();
    auto ends = mover_->step(posts);
    if (!ends.empty()) {
      std::lock_guard lock(progress_);
      for (const auto& end : ends) on_end(end);
    }
    if (!posts.empty() || !ends.empty())
      last_moved_ = Clock::now();
    else if (running)
      rest();
  }
  std::unique_lock lock(progress_);
  bool in_order = traffic_.empty();
  lock.unlock();
  mover_->close(in_order);
}

void Endpoint::rest() {
  Duration pause = seconds(options_.heartbeat);
  if (polled_ || leaving_until_)
    pause = std::clamp<Duration>((Clock::now() - last_moved_) / kPatience, kShortestPause, kLongestPause);
  std::unique_lock lock(sleep_mutex_);
  if (sleep_.wait_for(lock, pause, [&] { return woken_; })) last_moved_ = Clock::now();
  woken_ = false;
}

// What a peer throws ends that peer, and no other.
template <class Call>
void Endpoint::guarded(int rank, const Call& call) {
  Peer& peer = *peers_.at(rank);
  try {
    call(peer);
  } catch (const Error& error) {
    if (peer.is_open()) fail(rank, error);
  }
}

// False when all is over.
bool Endpoint::pass() {
  take_posts();
  look_after_time();
  for (auto& item : peers_) guarded(item.first, [&](Peer& peer) { peer.step(); });
  bool running = !stopping_ || !has_left();
  desk_.deliver(shared_.heard);
  return running;
}

void Endpoint::look_after_time() {
  auto now = Clock::now();
  // Stopped, or starved of a processor: then the peers were not heard because nobody listened.
  if (options_.silence > 0 && now - last_pass_ > seconds(options_.silence) / 2) {
    for (auto& [rank, peer] : peers_) peer->excuse(now);
  }
  last_pass_ = now;
  if (now < next_beat_) return;
  next_beat_ = now + seconds(options_.heartbeat);
  for (auto& item : peers_) {
    guarded(item.first, [&](Peer& peer) {
      peer.beat();
      peer.look_at_clock(now);
    });
  }
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

void Endpoint::on_end(const Mover::End& end) {
  Traffic::Flight flight = traffic_.end(end.id);
  guarded(flight.peer, [&](Peer& peer) { peer.on_end(end.id, std::move(flight.buffer), end.error); });
}

void Endpoint::fail(int rank, const Error& error) {
  desk_.deliver(shared_.heard);  // what it said before
  Peer& peer = *peers_.at(rank);
  // Before the transfers: who sees one fail finds the reason.
  desk_.note_failure(rank, error, peer.has_left() ? peer.inbox().take_unexpected() : matching::Inbox::Unexpecteds());
  peer.fail(error);
}

// True when everybody has said goodbye, or there was time enough.
bool Endpoint::has_left() {
  Error error(ErrorKind::PeerLost, rank_name(shared_.rank) + " has left");
  auto now = Clock::now();
  if (!leaving_until_) {
    leaving_until_ = now + kLongestGoodbye;
    last_moved_ = now;
    for (auto& [rank, peer] : peers_) {
      if (peer->is_open()) peer->take_leave(error);
    }
  }
  bool all = now >= *leaving_until_ ||
             std::all_of(peers_.begin(), peers_.end(), [](const auto& item) { return item.second->gone(); });
  if (!all) return false;
  for (auto& [rank, peer] : peers_) {
    if (peer->is_open()) fail(rank, error);
  }
  return true;
}

}  // namespace syncengine::packets
