// What every transport has for each peer, whatever carries the frames: matching in both directions, how long the peer
// has been silent, and how far its connection's end is.
//
// Thread-safety: under the endpoint's progress lock. Failure: on_control() throws what ends the peer.
#pragma once

#include <string>
#include <string_view>

#include "transport/matching/heartbeat_monitor.h"
#include "transport/matching/inbox.h"
#include "transport/matching/lifecycle.h"
#include "transport/matching/outbox.h"

namespace syncengine::matching {

struct Session {
  Session(Shared& endpoint, const HeartbeatTiming& timing, int peer)
      : shared(endpoint), rank(peer), withdrawals(endpoint, peer), heartbeat(endpoint, timing, peer) {}

  std::string name() const { return shared.names(rank); }
  void tell(const std::string& message) { add({.kind = Kind::Message}, message); }
  void add_abort(const Error& error);                 // what the peer is to know of its end
  void add(Frame frame, std::string_view text = {});  // of control
  void on_control(const Frame& frame, std::string_view text);
  void withdraw(uint64_t first, uint64_t last, const Error& error);
  void take_leave(const Error& error);  // what is under way is still sent

  Shared& shared;
  const int rank;
  std::string out;  // frames of control that wait to be sent
  Withdrawals withdrawals;
  Outbox outbox{shared, rank, out, withdrawals};
  Inbox inbox{shared, rank, out, withdrawals};
  HeartbeatMonitor heartbeat;
  Lifecycle life;
};

}  // namespace syncengine::matching
