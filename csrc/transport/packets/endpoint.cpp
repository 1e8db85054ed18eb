#include "transport/packets/endpoint.h"

#include <algorithm>
#include <utility>

#include "base/say.h"

namespace syncengine::packets {

Endpoint::Endpoint(std::unique_ptr<PacketTransport> transport, const Options& options, int rank,
                   const std::vector<int>& peers)
    : matching::Endpoint<Peer>(rank, options.names, options.checksum, options.timing),
      options_(options),
      transport_(std::move(transport)) {
  for (int peer : peers) peers_[peer] = std::make_unique<Peer>(shared_, traffic_, options_, peer);
}

void Endpoint::wake() {
  std::lock_guard lock(sleep_mutex_);
  woken_ = true;
  sleep_.notify_one();
}

void Endpoint::run(const std::function<void()>& progressed) {
  polled_ = !transport_->start([this] { wake(); });
  for (bool running = true; running;) {
    std::vector<PacketTransport::Packet> posts;
    bool news;
    std::string log;
    let_others_in();
    {
      std::lock_guard lock(progress_);
      running = pass();
      posts = traffic_.posted();
      news = std::exchange(shared_.news, false);
      log.swap(shared_.log);
    }
    if (!log.empty()) say(std::move(log));
    if (news) progressed();
    auto ends = transport_->step(posts);
    if (!ends.empty()) {
      std::lock_guard lock(progress_);
      for (const auto& end : ends) {
        PacketTraffic::PostedPacket packet = traffic_.end(end.id);
        guarded(packet.peer, [&](Peer& peer) { peer.on_end(end.id, std::move(packet.buffer), end.error); });
      }
    }
    if (!posts.empty() || !ends.empty())
      last_moved_ = Clock::now();
    else if (running)
      rest();
  }
  std::unique_lock lock(progress_);
  bool in_order = traffic_.empty();
  lock.unlock();
  transport_->close(in_order);
}

void Endpoint::rest() {
  constexpr Duration kShortestPause = std::chrono::microseconds(20), kLongestPause = std::chrono::milliseconds(5);
  constexpr int kPatience = 8;  // a pause is 1/8 of the time without a move, the most by which polling prolongs a wait
  Duration pause = heartbeat_;
  if (polled_ || is_leaving())
    pause = std::clamp<Duration>((Clock::now() - last_moved_) / kPatience, kShortestPause, kLongestPause);
  std::unique_lock lock(sleep_mutex_);
  if (sleep_.wait_for(lock, pause, [&] { return woken_; })) last_moved_ = Clock::now();
  woken_ = false;
}

// Makes one pass; returns false when all peers are done with.
bool Endpoint::pass() {
  take_posts();
  if (is_beat_due()) {
    for (auto& item : peers_) {
      guarded(item.first, [&](Peer& peer) {
        peer.beat();
        peer.look_at_clock(last_pass_);
      });
    }
  }
  // A peer that has failed is served, too: the message that says goodbye still has to be sent to it.
  for (auto& item : peers_) guarded(item.first, [](Peer& peer) { peer.step(); });
  if (stopping_ && !is_leaving()) last_moved_ = Clock::now();
  bool running = !stopping_ || !has_left();
  deliver(shared_.heard);
  return running;
}

}  // namespace syncengine::packets
