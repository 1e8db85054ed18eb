// Watches when a peer was last heard. Silence leads to a line on stderr, later to the peer's loss.
//
// Thread-safety: under the endpoint's progress lock.
#pragma once

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>

#include "base/deadline.h"
#include "base/error.h"
#include "base/texts.h"
#include "transport/matching/shared.h"

namespace syncengine::matching {

// Periods in seconds. If `silence` is 0, there are no heartbeats, and no peer is ever lost for its silence.
struct HeartbeatTiming {
  double heartbeat = 0.25;  // period in which a sign of life is sent
  double silence = 30.0;    // time without a sign of life after which a peer is lost
  double notice = 2.0;      // time without one after which a line says so

  bool is_judged() const { return silence > 0; }
  // Seconds without running after which this process excuses its peers: it has heard nobody because it did not listen.
  double pause() const { return std::min(silence, notice) / 2; }
};

class HeartbeatMonitor {
 public:
  HeartbeatMonitor(Shared& shared, const HeartbeatTiming& timing, int peer)
      : shared_(shared), timing_(timing), peer_(peer) {}

  void heard() {
    last_ = Clock::now();
    if (!noticed_) return;
    log(" is heard again, after " + seconds_text(*last_ - *noticed_));
    noticed_.reset();
  }
  // Counts the peer as heard, since this process did not run: the peer's silence proves nothing.
  void excuse(Clock::time_point now) {
    if (last_) last_ = now;
    noticed_.reset();
  }
  // Throws PeerLost if the peer has been silent for too long.
  void judge(Clock::time_point now) {
    if (!timing_.is_judged() || !last_) return;
    const double silent = std::chrono::duration<double>(now - *last_).count();
    if (silent < std::min(timing_.notice, timing_.silence)) return;
    char due[64];
    std::snprintf(due, sizeof(due), "(a heartbeat is due every %.2f s)", timing_.heartbeat);
    const std::string what = " has been silent for " + seconds_text(silent) + " " + due +
                             ": its process is stopped, or its host or the network to it is down",
                      limit = " given up after " + seconds_text(timing_.silence) +
                              " (init(silence=...) or SYNCENGINE_SILENCE)";
    if (silent >= timing_.silence) throw Error(ErrorKind::PeerLost, shared_.names(peer_) + what + "; it was" + limit);
    if (noticed_) return;
    noticed_ = last_;
    log(what + "; it is" + limit);
  }

 private:
  void log(const std::string& what) {
    shared_.log += "syncengine: " + shared_.names(shared_.rank) + ": " + shared_.names(peer_) + what + "\n";
  }

  Shared& shared_;
  HeartbeatTiming timing_;
  int peer_;
  std::optional<Clock::time_point> last_;     // empty before its first sign of life: it may still be connecting
  std::optional<Clock::time_point> noticed_;  // when the silence began about which a line was written
};

}  // namespace syncengine::matching
