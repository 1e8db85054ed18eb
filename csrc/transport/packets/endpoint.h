// Interhost by packets: one thread, in run(), hands them to the mover, which it asks again and again where that does not call.
//
// Locks: as in tcp::Endpoint: `turn_` lets withdraw() in between two passes, `progress_` guards the peers and what is under
// way, for one pass; then the desk's. None is held while the mover works: it may take the GIL, whose holder may wait for one.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "transport/interhost.h"
#include "transport/matching/desk.h"
#include "transport/matching/shared.h"
#include "transport/packets/packets.h"
#include "transport/packets/peer.h"
#include "transport/packets/traffic.h"

namespace syncengine::packets {

class Endpoint : public Interhost {
 public:
  Endpoint(std::unique_ptr<Mover> mover, const Options& options, int rank, const std::vector<int>& peers);

  std::shared_ptr<Transfer> send(int peer, uint64_t tag, const std::byte* data, size_t bytes) override;
  std::shared_ptr<Transfer> receive(int peer, uint64_t tag, std::byte* data, size_t bytes) override;
  void tell(int peer, const std::string& message) override;
  std::optional<Message> hear() override { return desk_.hear(); }
  std::optional<Error> failure(int peer) const override { return desk_.failure(peer); }
  void withdraw(uint64_t first, uint64_t last, const Error& error) override;
  void run(const std::function<void()>& progressed) override;
  void stop() override;

 private:
  void check_peer(int peer) const;
  void wake();
  void rest();

  // Of the thread that runs, under the progress lock.
  bool pass();
  void look_after_time();
  bool has_left();
  void take_posts();
  void on_end(const Mover::End& end);
  void fail(int rank, const Error& error);
  template <class Call>
  void guarded(int rank, const Call& call);

  Options options_;
  matching::Desk desk_;
  std::mutex turn_;
  std::mutex progress_;
  matching::Shared shared_;
  Traffic traffic_;
  std::map<int, std::unique_ptr<Peer>> peers_;
  std::unique_ptr<Mover> mover_;
  bool polled_ = true;
  Clock::time_point last_moved_ = Clock::now();
  Clock::time_point last_pass_ = Clock::now();
  Clock::time_point next_beat_{};
  std::optional<Clock::time_point> leaving_until_;
  std::atomic<bool> stopping_{false};

  std::mutex sleep_mutex_;
  std::condition_variable sleep_;
  bool woken_ = false;
};

}  // namespace syncengine::packets
