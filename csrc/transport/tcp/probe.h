// Finds out whether the process of a lost peer has ended. If so, its host's kernel refuses connections to the port at
// which the process has listened since before others had its address. A live process keeps that port open as long as
// peers may wrongly take it for dead (peer.h). A connection that is accepted proves that the process lives. Any other
// outcome proves nothing, and the probe tries again.
//
// Ownership: owns its socket. Thread-safety: under the endpoint's progress lock. Failure: never throws.
#pragma once

#include <cstdint>

#include "base/deadline.h"
#include "transport/tcp/address.h"
#include "transport/tcp/socket.h"

namespace syncengine::tcp {

inline constexpr uint64_t kAlarm = ~uint64_t{0};  // an epoll event that only wakes the loop

class Probe {
 public:
  Probe(const Ip& from, const Ip& to, uint16_t port) : from_(from), to_(to), port_(port) {}

  // Tries to connect, and returns whether the port has refused. Called in each pass. The end of a try wakes `epoll`.
  bool is_refused(int epoll);
  void end() { fd_.reset(); }  // drops the try that is under way

 private:
  const Ip from_, to_;
  const uint16_t port_;
  ParentFd fd_;
  Clock::time_point next_{};  // when to ask again
};

}  // namespace syncengine::tcp
