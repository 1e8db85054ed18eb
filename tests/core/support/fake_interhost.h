// An Interhost whose hosts are objects of one process: bytes are copied under one lock by the receiving side's run().
// For tests of what is built on the interface, and the simplest thing that passes its conformance suite.
//
// A fault: cut() is a rank's sudden death.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "transport/interhost.h"

namespace syncengine::testing {

class FakeNetwork : public std::enable_shared_from_this<FakeNetwork> {
 public:
  static std::shared_ptr<FakeNetwork> create(int size) { return std::shared_ptr<FakeNetwork>(new FakeNetwork(size)); }

  std::unique_ptr<Interhost> endpoint(int rank);

  // Everybody else finds `rank` dead.
  void cut(int rank) {
    std::lock_guard lock(mutex_);
    lose(rank, Error(ErrorKind::PeerLost, "rank " + std::to_string(rank) + " died, or its connection broke"));
  }
  // Before the job: bytes are moved by the thread in run() alone.
  void bind() { bound_ = true; }
  // Of `rank`, by other threads than this one.
  size_t steps_of_others(int rank) {
    std::lock_guard lock(mutex_);
    size_t sum = 0;
    for (auto [thread, steps] : hosts_[rank].steps)
      if (thread != std::this_thread::get_id()) sum += steps;
    return sum;
  }

 private:
  friend class FakeInterhost;
  using Transfer = Interhost::Transfer;

  struct Piece {
    std::byte* data;  // const in a send
    size_t bytes;
    std::shared_ptr<Transfer> transfer;
  };
  using Pieces = std::map<std::pair<int, uint64_t>, Piece>;  // by peer and tag
  struct Host {
    Pieces sends, receives;
    std::deque<Interhost::Message> sent, heard;  // `sent`: on their way to this host
    std::map<int, Error> failures;
    bool news = false;
    bool stopping = false;
    bool woken = false;
    std::map<std::thread::id, size_t> steps = {};  // by the thread that made them
  };

  explicit FakeNetwork(int size) : hosts_(size) {}

  template <class Concerned>
  static void end(Pieces& pieces, const Error& error, const Concerned& concerned) {
    std::erase_if(pieces, [&](auto& item) {
      auto [peer, tag] = item.first;
      if (!concerned(peer, tag)) return false;
      item.second.transfer->fail(error);
      return true;
    });
  }

  void lose(int rank, const Error& error) {
    for (int other = 0; other < static_cast<int>(hosts_.size()); ++other) {
      if (other != rank) fail(other, rank, error);
    }
    changed_.notify_all();
  }

  void fail(int rank, int peer, const Error& error) {
    Host& host = hosts_[rank];
    if (!host.failures.emplace(peer, error).second) return;
    hear_sent(host);  // its last words came before
    for (auto* pieces : {&host.sends, &host.receives}) {
      end(*pieces, error, [&](int other, uint64_t) { return other == peer; });
    }
    host.news = true;
  }

  static void hear_sent(Host& host) {
    while (!host.sent.empty()) {
      host.heard.push_back(std::move(host.sent.front()));
      host.sent.pop_front();
      host.news = true;
    }
  }

  // Brings to `rank` what can be brought.
  void deliver(int rank) {
    Host& host = hosts_[rank];
    hear_sent(host);
    for (auto next = host.receives.begin(); next != host.receives.end();) {
      auto receive = next++;
      auto [peer, tag] = receive->first;
      Host& sender = hosts_[peer];
      auto send = sender.sends.find({rank, tag});
      if (send == sender.sends.end()) continue;
      if (send->second.bytes != receive->second.bytes) {
        size_t sent = send->second.bytes, wanted = receive->second.bytes;
        fail(rank, peer, differs(peer, sent, rank, wanted));
        fail(peer, rank, differs(peer, sent, rank, wanted));
        changed_.notify_all();
        return;  // `next` may be gone
      }
      if (send->second.bytes) std::memcpy(receive->second.data, send->second.data, send->second.bytes);
      send->second.transfer->finish();
      receive->second.transfer->finish();
      sender.sends.erase(send);
      host.receives.erase(receive);
      sender.news = host.news = true;
      changed_.notify_all();
    }
  }

  static Error differs(int from, size_t sent, int to, size_t wanted) {
    return {ErrorKind::Mismatch, "rank " + std::to_string(from) + " sends " + std::to_string(sent) +
                                     " bytes where rank " + std::to_string(to) + " expects " + std::to_string(wanted)};
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Host> hosts_;
  bool bound_ = false;
};

class FakeInterhost : public Interhost {
 public:
  FakeInterhost(std::shared_ptr<FakeNetwork> network, int rank) : network_(std::move(network)), rank_(rank) {}

  std::shared_ptr<Transfer> send(int peer, uint64_t tag, const std::byte* data, size_t bytes) override {
    return post(&FakeNetwork::Host::sends, peer, tag, const_cast<std::byte*>(data), bytes);
  }
  std::shared_ptr<Transfer> receive(int peer, uint64_t tag, std::byte* data, size_t bytes) override {
    return post(&FakeNetwork::Host::receives, peer, tag, data, bytes);
  }

  void tell(int peer, const std::string& message) override {
    if (message.size() > kMaxMessage) throw Error(ErrorKind::InvalidUsage, "a message has at most 64 KiB");
    std::lock_guard lock(network_->mutex_);
    network_->hosts_[peer].sent.push_back({rank_, message});
    network_->changed_.notify_all();
  }
  std::optional<Message> hear() override {
    std::lock_guard lock(network_->mutex_);
    auto& heard = own().heard;
    if (heard.empty()) return {};
    Message message = std::move(heard.front());
    heard.pop_front();
    return message;
  }

  std::optional<Error> failure(int peer) const override {
    std::lock_guard lock(network_->mutex_);
    auto& failures = network_->hosts_[rank_].failures;
    auto found = failures.find(peer);
    return found == failures.end() ? std::nullopt : std::optional(found->second);
  }

  void withdraw(const std::vector<int>& peers, uint64_t first, uint64_t last, const Error& error) override {
    std::lock_guard lock(network_->mutex_);
    for (auto* pieces : {&own().sends, &own().receives}) {
      FakeNetwork::end(*pieces, error, [&](int peer, uint64_t tag) {
        return first <= tag && tag <= last && std::count(peers.begin(), peers.end(), peer) > 0;
      });
    }
    own().news = true;
    network_->changed_.notify_all();
  }

  void run(const std::function<void()>& progressed) override {
    for (auto last = Step::Quiet; last != Step::Over;) {
      last = step(seconds(1));
      if (last != Step::Quiet) progressed();
    }
  }
  bool has_steps() const override { return !network_->bound_; }
  Step step(Duration at_most) override {
    std::unique_lock lock(network_->mutex_);
    ++own().steps[std::this_thread::get_id()];
    auto deliver = [&] {
      network_->deliver(rank_);
      return own().news || own().stopping || own().woken;
    };
    if (!deliver()) network_->changed_.wait_for(lock, at_most, deliver);
    own().woken = false;
    if (!own().stopping) return std::exchange(own().news, false) ? Step::News : Step::Quiet;
    network_->lose(rank_, {ErrorKind::PeerLost, "rank " + std::to_string(rank_) + " has left"});
    return Step::Over;
  }
  void wake() override { set(&FakeNetwork::Host::woken); }
  void stop() override { set(&FakeNetwork::Host::stopping); }

 private:
  FakeNetwork::Host& own() { return network_->hosts_[rank_]; }

  void set(bool FakeNetwork::Host::* flag) {
    std::lock_guard lock(network_->mutex_);
    own().*flag = true;
    network_->changed_.notify_all();
  }

  std::shared_ptr<Transfer> post(FakeNetwork::Pieces FakeNetwork::Host::* pieces, int peer, uint64_t tag,
                                 std::byte* data, size_t bytes) {
    if (bytes > kMaxTransfer) throw Error(ErrorKind::InvalidUsage, "a transfer has at most 1 MiB");
    auto transfer = std::make_shared<Transfer>();
    std::lock_guard lock(network_->mutex_);
    auto failed = own().failures.find(peer);
    if (failed != own().failures.end()) {
      transfer->fail(failed->second);
    } else {
      (own().*pieces)[{peer, tag}] = {data, bytes, transfer};
      network_->changed_.notify_all();
    }
    return transfer;
  }

  std::shared_ptr<FakeNetwork> network_;
  int rank_;
};

inline std::unique_ptr<Interhost> FakeNetwork::endpoint(int rank) {
  return std::make_unique<FakeInterhost>(shared_from_this(), rank);
}

}  // namespace syncengine::testing
