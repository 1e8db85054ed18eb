// Endpoints between hosts, each with a thread that runs it, and bytes to send.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "test.h"
#include "transport/interhost.h"

namespace syncengine::testing {

using Endpoints = std::vector<std::unique_ptr<Interhost>>;
using MakeEndpoints = Endpoints (*)(int size);
using Transfer = std::shared_ptr<Interhost::Transfer>;
using Bytes = std::vector<std::byte>;

// Bytes that say where they belong.
inline Bytes pattern(size_t bytes, uint64_t seed) {
  Bytes data(bytes);
  uint64_t state = seed * 0x9e3779b97f4a7c15 + 1;
  for (size_t at = 0; at < bytes; at += sizeof(state)) {  // eight at once: sanitizers see each write
    state = state * 6364136223846793005 + 1442695040888963407;
    const uint64_t mixed = state ^ (state >> 32);
    std::memcpy(data.data() + at, &mixed, std::min(sizeof(mixed), bytes - at));
  }
  return data;
}

// An endpoint with the thread that runs it.
class Running {
 public:
  // `limit`: of each wait.
  explicit Running(std::unique_ptr<Interhost> endpoint, Duration limit = seconds(60))
      : endpoint_(std::move(endpoint)), limit_(limit), thread_([this] { run(); }) {}
  Running(const Running&) = delete;
  ~Running() { leave(); }

  Interhost* operator->() { return endpoint_.get(); }

  void leave() {
    if (!thread_.joinable()) return;
    endpoint_->stop();
    thread_.join();
  }

  // Sleeps until `condition`, looking only when the endpoint says that something moved.
  void wait(const std::function<bool()>& condition, const char* what) {
    const Deadline deadline = Deadline::after(limit_);
    for (;;) {
      const uint64_t seen = rings_;  // before the look: a ring during it ends the wait at once
      if (condition()) return;
      std::unique_lock lock(mutex_);
      if (!changed_.wait_for(lock, deadline.left(limit_), [&] { return rings_ != seen; }))
        throw Error(ErrorKind::Timeout, std::string("not within the limit: ") + what);
    }
  }
  void wait_ended(const Transfer& transfer) {
    wait([&] { return transfer->ended(); }, "a transfer's end");
  }
  void wait_done(const Transfer& transfer) {
    wait_ended(transfer);
    if (transfer->state() == Interhost::Transfer::State::Failed) throw Error(transfer->error());
  }
  Error wait_failed(const Transfer& transfer) {
    wait_ended(transfer);
    CHECK(transfer->state() == Interhost::Transfer::State::Failed);
    return transfer->error();
  }
  Error wait_lost(int peer) {
    wait([&] { return endpoint_->failure(peer).has_value(); }, "a peer's end");
    return *endpoint_->failure(peer);
  }
  Interhost::Message wait_message() {
    std::optional<Interhost::Message> message;
    wait([&] { return message || (message = endpoint_->hear()); }, "a message");
    return *message;
  }

 private:
  void run() {
    if (!endpoint_->has_steps()) return endpoint_->run([this] { ring(); });
    for (auto last = Interhost::Step::Quiet; last != Interhost::Step::Over;) {
      last = endpoint_->step(limit_);
      if (last != Interhost::Step::Quiet) ring();
    }
  }
  void ring() {
    std::lock_guard lock(mutex_);
    ++rings_;
    changed_.notify_all();
  }

  std::unique_ptr<Interhost> endpoint_;
  const Duration limit_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<uint64_t> rings_ = 0;
  std::thread thread_;  // last: starts when the rest is ready
};

// Moves `sent` from one rank to another, of which the receiver is ready first.
inline void check_transfer(Running& sender, int from, Running& receiver, int to, uint64_t tag, const Bytes& sent) {
  Bytes got(sent.size());
  auto receive = receiver->receive(from, tag, got.data(), got.size());
  auto send = sender->send(to, tag, sent.data(), sent.size());
  receiver.wait_done(receive);
  sender.wait_done(send);
  CHECK(got == sent);
}

class Cluster {
 public:
  Cluster(MakeEndpoints make, int size) {
    for (auto& endpoint : make(size)) hosts_.push_back(std::make_unique<Running>(std::move(endpoint)));
  }
  Running& operator[](int rank) { return *hosts_[rank]; }
  void check_transfer(int from, int to, uint64_t tag, const Bytes& sent) {
    testing::check_transfer(*hosts_[from], from, *hosts_[to], to, tag, sent);
  }

 private:
  std::vector<std::unique_ptr<Running>> hosts_;
};

}  // namespace syncengine::testing
