// When a peer was last heard, and what follows from its silence: a line on stderr, later the peer's loss.
//
// Thread-safety: under the endpoint's progress lock.
#pragma once

#include <algorithm>
#include <optional>

#include "base/deadline.h"
#include "transport/matching/shared.h"

namespace syncengine::matching {

// Seconds. Where `silence` is 0 there are no heartbeats, and nothing follows.
struct HeartbeatTiming {
  static constexpr double kNotice = 2.0;
  double heartbeat = 0.25;  // a sign of life is sent so often
  double silence = 30.0;    // without one from a peer, after which it is lost
  double notice = kNotice;  // after which a line says so

  bool is_judged() const { return silence > 0; }
  // A rank that did not run for so long has heard nobody because it did not listen.
  double pause() const { return std::min(silence, notice) / 2; }
};

class HeartbeatMonitor {
 public:
  HeartbeatMonitor(Shared& shared, const HeartbeatTiming& timing, int peer)
      : shared_(shared), timing_(timing), peer_(peer) {}

  void heard() {
    last_ = Clock::now();
    if (noticed_) note_return();
  }
  void excuse(Clock::time_point now);  // this process did not run: silence proves nothing
  void judge(Clock::time_point now);   // throws PeerLost

 private:
  void note_return();

  Shared& shared_;
  HeartbeatTiming timing_;
  int peer_;
  std::optional<Clock::time_point> last_;     // nothing before its first sign of life: it may still be connecting
  std::optional<Clock::time_point> noticed_;  // since when it had been silent, when the line was written
};

}  // namespace syncengine::matching
