// A PacketTransport whose ranks are objects of one process: packets are copied under one lock.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "test.h"
#include "transport/packets/packets.h"

namespace syncengine::testing {

class FakeWire {
 public:
  struct How {
    bool calls = false;      // when a packet has ended, so that nobody has to ask
    bool backwards = false;  // tells last what has ended first
  };

  FakeWire(int size, How how) : how_(how), ends_(size), wake_(size), closed_(size) {}

  // Nothing comes through any more, from it or to it.
  void cut(int rank) {
    std::lock_guard lock(mutex_);
    cut_.insert(rank);
    for (auto& [way, queues] : ways_) match(way.first, way.second);
    call_all();
  }
  // How `rank` was closed: nothing before.
  std::optional<bool> closed(int rank) {
    std::lock_guard lock(mutex_);
    return closed_[rank];
  }

 private:
  friend class FakePacketTransport;
  struct Queues {
    std::deque<packets::PacketTransport::Packet> sent, wanted;
  };

  void match(int from, int to) {
    auto& [sent, wanted] = ways_[{from, to}];
    if (cut_.count(from) || cut_.count(to)) {
      for (auto [queue, owner] : {std::pair{&sent, from}, {&wanted, to}}) {
        for (const auto& packet : *queue) ends_[owner].push_back({packet.id, "the cable was cut"});
        queue->clear();
      }
    }
    while (!sent.empty() && !wanted.empty()) {
      bool fits = sent.front().bytes == wanted.front().bytes;
      if (fits) std::copy_n(sent.front().data, sent.front().bytes, wanted.front().data);
      for (auto [packet, owner] : {std::pair{sent.front(), from}, {wanted.front(), to}})
        ends_[owner].push_back({packet.id, fits ? "" : "the sizes differ"});
      sent.pop_front();
      wanted.pop_front();
    }
  }

  void call_all() {
    for (size_t rank = 0; rank < ends_.size(); ++rank) {
      if (wake_[rank] && !ends_[rank].empty()) wake_[rank]();
    }
  }

  How how_;
  std::mutex mutex_;
  std::map<std::pair<int, int>, Queues> ways_;
  std::vector<std::vector<packets::PacketTransport::End>> ends_;
  std::vector<std::function<void()>> wake_;
  std::vector<std::optional<bool>> closed_;
  std::set<int> cut_;
};

class FakePacketTransport : public packets::PacketTransport {
 public:
  FakePacketTransport(std::shared_ptr<FakeWire> wire, int rank) : wire_(std::move(wire)), rank_(rank) {}
  ~FakePacketTransport() override { forget(); }

  bool start(std::function<void()> wake) override {
    std::lock_guard lock(wire_->mutex_);
    if (wire_->how_.calls) wire_->wake_[rank_] = std::move(wake);
    return wire_->how_.calls;
  }

  std::vector<End> step(const std::vector<Packet>& posts) override {
    std::lock_guard lock(wire_->mutex_);
    for (const Packet& packet : posts) {
      CHECK(packet.bytes > 0);
      int from = packet.outgoing ? rank_ : packet.peer, to = packet.outgoing ? packet.peer : rank_;
      auto& queues = wire_->ways_[{from, to}];
      (packet.outgoing ? queues.sent : queues.wanted).push_back(packet);
      wire_->match(from, to);
    }
    auto ends = std::exchange(wire_->ends_[rank_], {});
    if (!posts.empty()) wire_->call_all();
    if (wire_->how_.backwards) std::reverse(ends.begin(), ends.end());
    return ends;
  }

  void close(bool in_order) override {
    forget();
    std::lock_guard lock(wire_->mutex_);
    wire_->closed_[rank_] = in_order;
  }

 private:
  void forget() {
    std::lock_guard lock(wire_->mutex_);
    wire_->wake_[rank_] = nullptr;
    for (auto& [way, queues] : wire_->ways_) {
      if (way.first == rank_) queues.sent.clear();
      if (way.second == rank_) queues.wanted.clear();
    }
  }

  std::shared_ptr<FakeWire> wire_;
  int rank_;
};

}  // namespace syncengine::testing
