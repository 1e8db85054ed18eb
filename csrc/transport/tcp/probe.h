// Finds out whether the process of a lost peer has ended: then the kernel of its host refuses a connection to the port
// that the process has listened on since before init(), and keeps as long as it may be taken for dead wrongly (peer.h).
// A connection that comes about says that the process lives, and anything else says nothing: the probe asks again.
//
// Ownership: owns its socket. Thread-safety: under the endpoint's progress lock. Failure: never throws.
#pragma once

#include <cstdint>

#include "base/deadline.h"
#include "transport/tcp/address.h"
#include "transport/tcp/socket.h"

namespace syncengine::tcp {

inline constexpr uint64_t kAlarm = ~uint64_t{0};  // the epoll event of what only wakes the loop

class Probe {
 public:
  Probe(const Ip& from, const Ip& to, uint16_t port) : from_(from), to_(to), port_(port) {}

  // To be called in each pass: whether the port has refused by now. `epoll` is woken once there is an answer.
  bool is_refused(int epoll);
  void end() { fd_.reset(); }  // what is under way

 private:
  const Ip from_, to_;
  const uint16_t port_;
  ParentFd fd_;
  Clock::time_point next_{};  // when to ask again
};

}  // namespace syncengine::tcp
