// Interhost over TCP: one thread at a time, in step(), moves everything; it sleeps in epoll, and calls from other threads wake it.
//
// Locks: a thread that holds one may take only those below it. `turn_` lets withdraw() in between two passes; `progress_`
// guards the peers, for one pass: at most a system call each way on each connection; then the desk's.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "transport/interhost.h"
#include "transport/matching/desk.h"
#include "transport/matching/shared.h"
#include "transport/tcp/peer.h"
#include "transport/tcp/tcp.h"

namespace syncengine::tcp {

class Endpoint : public Interhost {
 public:
  // `sockets` by peer: the first for control, the others for data.
  Endpoint(const Options& options, int rank, std::map<int, std::vector<UniqueFd>> sockets);

  std::shared_ptr<Transfer> send(int peer, uint64_t tag, const std::byte* data, size_t bytes) override;
  std::shared_ptr<Transfer> receive(int peer, uint64_t tag, std::byte* data, size_t bytes) override;
  void tell(int peer, const std::string& message) override;
  std::optional<Message> hear() override { return desk_.hear(); }
  std::optional<Error> failure(int peer) const override { return desk_.failure(peer); }
  void withdraw(uint64_t first, uint64_t last, const Error& error) override;
  void run(const std::function<void()>& progressed) override;
  bool has_steps() const override { return true; }
  Step step(Duration at_most) override;
  void wake() override;
  bool has_unsent() const override;
  void stop() override;

 private:
  void check_peer(int peer) const;

  // Of the thread that makes the step, under the progress lock.
  void on_event(uint64_t key, uint32_t events);
  bool pass();
  bool is_beat_due();
  bool has_left();
  void take_posts();
  void fail(int rank, const Error& error);
  template <class Call>
  void guarded(int rank, const Call& call);

  Options options_;
  Desk desk_;
  std::mutex turn_;
  mutable std::mutex progress_;
  Shared shared_;
  std::map<int, std::unique_ptr<Peer>> peers_;
  ParentFd epoll_;
  bool busy_ = true;  // there may be more to do at once
  Clock::time_point next_beat_{};
  Clock::time_point last_pass_ = Clock::now();
  std::optional<Clock::time_point> leaving_until_;

  ParentFd alarm_;
  std::atomic<bool> stopping_{false};
};

}  // namespace syncengine::tcp
