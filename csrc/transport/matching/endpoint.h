// The part that the endpoints of all transports have in common: calls of any thread, posts on their way to peers,
// faults, the timing of heartbeats, and leaving. How bytes move is the transport's business.
//
// `Peer` has session(), withdraw(), take_leave(), gone() and fail().
//
// Locks, in the order in which a thread may take them: `turn_` lets withdraw() in between two passes; `progress_`
// guards the peers for one pass; the mutex of the SubmissionQueue comes last.
#pragma once

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "transport/interhost.h"
#include "transport/matching/heartbeat_monitor.h"
#include "transport/matching/shared.h"
#include "transport/matching/submission_queue.h"

namespace syncengine::matching {

template <class Peer>
class Endpoint : public SubmissionQueue {
 public:
  void withdraw(const std::vector<int>& peers, uint64_t first, uint64_t last, const Error& error) override {
    std::lock_guard turn(turn_);
    std::lock_guard lock(progress_);
    take_posts();
    for (int rank : peers) {
      auto found = peers_.find(rank);
      if (found != peers_.end() && !failure(rank)) found->second->withdraw(first, last, error);
    }
    shared_.news = true;
    wake();
  }
  void stop() override {
    stopping_ = true;
    wake();
  }

 protected:
  Endpoint(int rank, const RankNames& names, bool checksum, const HeartbeatTiming& timing)
      : SubmissionQueue(rank, names, checksum), heartbeat_(seconds(timing.heartbeat)), timing_(timing) {}

  void let_others_in() { std::lock_guard turn(turn_); }

  // The functions below are for the thread that moves bytes, under `progress_`.

  // Calls `call` for a peer. An error that it throws ends that peer, and no other.
  template <class Call>
  void guarded(int rank, const Call& call) {
    Peer& peer = *peers_.at(rank);
    try {
      call(peer);
    } catch (const Error& error) {
      fail(rank, error);
    }
  }
  template <class Call>
  void for_each_unbroken(const Call& call) {
    for (auto& [rank, peer] : peers_) {
      if (!peer->session().life.is_broken()) guarded(rank, call);
    }
  }

  void take_posts() {
    for (QueuedPost& post : take()) {
      if (!peers_.at(post.peer)->session().life.is_in_use() && post_too_late(post)) {
        shared_.news = true;
        continue;
      }
      guarded(post.peer, [&](Peer& peer) {
        switch (post.kind) {
          case QueuedPost::Send:
            peer.session().outbox.post(post.tag, post.data, post.bytes, std::move(post.transfer));
            break;
          case QueuedPost::Receive:
            peer.session().inbox.post(post.tag, post.data, post.bytes, std::move(post.transfer));
            break;
          case QueuedPost::Tell: peer.session().tell(post.message); break;
        }
      });
    }
  }

  // Whether a heartbeat period is over: heartbeats are to be sent, and silence to be judged. Called in each pass.
  bool is_beat_due() {
    auto now = Clock::now();
    // This process was stopped, or starved of a processor: the peers were not heard because nobody listened.
    if (timing_.is_judged() && now - last_pass_ > seconds(timing_.pause())) {
      for (auto& [rank, peer] : peers_) peer->session().heartbeat.excuse(now);
    }
    last_pass_ = now;
    if (now < next_beat_) return false;
    next_beat_ = now + heartbeat_;
    return true;
  }

  bool is_leaving() const { return leaving_until_.has_value(); }

  // Called after stop(). The first call says goodbye to all peers and returns false. Later calls return true once all
  // have answered, or a second has passed.
  bool has_left() {
    constexpr Duration kLongestGoodbye = std::chrono::seconds(1);
    Error error(ErrorKind::PeerLost, shared_.names(shared_.rank) + " has left");
    auto now = Clock::now();
    if (!leaving_until_) {
      leaving_until_ = now + kLongestGoodbye;
      for (auto& [rank, peer] : peers_) {
        if (peer->session().life.is_in_use()) peer->take_leave(error);
      }
      return false;
    }
    bool all = std::all_of(peers_.begin(), peers_.end(), [](const auto& item) { return item.second->gone(); });
    if (!all && now < *leaving_until_) return false;
    for (auto& [rank, peer] : peers_) fail(rank, error);
    return true;
  }

  mutable std::mutex progress_;
  std::map<int, std::unique_ptr<Peer>> peers_;
  std::atomic<bool> stopping_{false};
  const Duration heartbeat_;
  Clock::time_point last_pass_ = Clock::now();

 private:
  bool is_peer(int rank) const override { return peers_.contains(rank); }

  // Ends a peer; only its first failure counts.
  void fail(int rank, const Error& error) {
    if (failure(rank)) return;
    deliver(shared_.heard);  // what it said before
    Peer& peer = *peers_.at(rank);
    // The failure is noted before the transfers fail, so that whoever sees one of them fail finds the reason.
    bool has_left = peer.session().life.has_peer_left();
    note_failure(rank, error, has_left ? peer.session().inbox.take_unexpected() : Inbox::Unexpecteds(),
                 peer.session().end);
    peer.fail(error);
  }

  std::mutex turn_;
  const HeartbeatTiming timing_;
  Clock::time_point next_beat_{};
  std::optional<Clock::time_point> leaving_until_;
};

}  // namespace syncengine::matching
