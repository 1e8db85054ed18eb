// An Interhost of packets: one thread, in run(), hands them to the transport, and polls it if it does not call back.
//
// Locks: as in matching::Endpoint. None is held while the transport works: it may take the GIL, whose holder may wait
// for one of these locks.
#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/deadline.h"
#include "transport/matching/endpoint.h"
#include "transport/packets/packets.h"
#include "transport/packets/peer.h"

namespace syncengine::packets {

class Endpoint : public matching::Endpoint<Peer> {
 public:
  // `peers` are the ranks of the job on other hosts. run() must follow soon, as nothing moves before.
  Endpoint(std::unique_ptr<PacketTransport> transport, const Options& options, int rank, const std::vector<int>& peers);

  void run(const std::function<void()>& progressed) override;
  void wake() override;

 private:
  void rest();
  bool pass();  // called by the thread in run(), under the progress lock

  Options options_;
  PacketTraffic traffic_;
  std::unique_ptr<PacketTransport> transport_;
  bool polled_ = true;
  Clock::time_point last_moved_ = Clock::now();

  std::mutex sleep_mutex_;
  std::condition_variable sleep_;
  bool woken_ = false;
};

}  // namespace syncengine::packets
