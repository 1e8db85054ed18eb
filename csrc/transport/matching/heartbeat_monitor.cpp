#include "transport/matching/heartbeat_monitor.h"

#include <cstdio>
#include <string>

namespace syncengine::matching {

namespace {

double between(Clock::time_point begin, Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

}  // namespace

void HeartbeatMonitor::excuse(Clock::time_point now) {
  if (last_) last_ = now;
  noticed_.reset();
}

void HeartbeatMonitor::judge(Clock::time_point now) {
  if (!timing_.is_judged() || !last_) return;
  double silent = between(*last_, now);
  if (silent < std::min(timing_.notice, timing_.silence)) return;
  char due[64];
  std::snprintf(due, sizeof(due), "(a heartbeat is due every %.2f s)", timing_.heartbeat);
  std::string what = shared_.names(peer_) + " has been silent for " + seconds_text(silent) + " " + due +
                     ": its process is stopped, or its host or the network to it is down";
  if (silent >= timing_.silence)
    throw Error(ErrorKind::PeerLost, what + "; it was given up after " + seconds_text(timing_.silence) +
                                         " (init(silence=...) or SYNCENGINE_SILENCE)");
  if (noticed_) return;
  noticed_ = last_;
  shared_.log += "[syncengine] " + shared_.names(shared_.rank) + ": " + what + "; it is given up after " +
                 seconds_text(timing_.silence) + " (init(silence=...) or SYNCENGINE_SILENCE)\n";
}

void HeartbeatMonitor::note_return() {
  shared_.log += "[syncengine] " + shared_.names(shared_.rank) + ": " + shared_.names(peer_) +
                 " is heard again, after " + seconds_text(between(*noticed_, *last_)) + "\n";
  noticed_.reset();
}

}  // namespace syncengine::matching
