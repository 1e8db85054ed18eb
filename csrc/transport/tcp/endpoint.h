// Interhost over TCP: one thread at a time, in step(), moves everything; it sleeps in epoll, and calls from other
// threads wake it.
//
// Locks: as in matching::Endpoint. A pass makes at most a system call each way on each connection.
#pragma once

#include <functional>
#include <map>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "transport/matching/endpoint.h"
#include "transport/tcp/peer.h"
#include "transport/tcp/tcp.h"

namespace syncengine::tcp {

class Endpoint : public matching::Endpoint<Peer> {
 public:
  // `sockets` by peer: the first for control, the others for data.
  Endpoint(const Options& options, int rank, std::map<int, std::vector<UniqueFd>> sockets);

  void run(const std::function<void()>& progressed) override;
  bool has_steps() const override { return true; }
  Step step(Duration at_most) override;
  void wake() override;
  bool has_unsent() const override;

 private:
  // Of the thread that makes the step, under the progress lock.
  void on_event(uint64_t key, uint32_t events);
  bool pass();

  Options options_;
  ParentFd epoll_;
  ParentFd alarm_;
  bool busy_ = true;  // there may be more to do at once
};

}  // namespace syncengine::tcp
