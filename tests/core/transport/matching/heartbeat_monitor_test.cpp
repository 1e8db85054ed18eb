// When a peer's silence is noticed, when it is an error, and what is said: by given times, no clock but for heard().
#include "transport/matching/heartbeat_monitor.h"
#include "test.h"

namespace syncengine::matching {

namespace {

struct Scene {
  Shared shared;
  HeartbeatMonitor heartbeat;
  explicit Scene(HeartbeatTiming timing = {}) : heartbeat((shared.rank = 0, shared), timing, 1) {}

  std::string said_after(double silent) {
    heartbeat.judge(Clock::now() + seconds(silent));
    return std::exchange(shared.log, {});
  }
};

}  // namespace

using testing::contains;

TEST(heartbeat_notices_a_silence_once_and_its_end) {
  Scene scene;
  scene.heartbeat.heard();
  CHECK_EQ(scene.said_after(1.9), "");
  std::string said = scene.said_after(2.1);
  CHECK(contains(said, "syncengine: rank 0: rank 1 has been silent for 2.1 s (a heartbeat is due every 0.25 s)"));
  CHECK(contains(said, "given up after 30.0 s") && contains(said, "SYNCENGINE_SILENCE"));
  CHECK_EQ(scene.said_after(2.4), "");
  CHECK_EQ(scene.said_after(29.5), "");
  scene.heartbeat.heard();
  CHECK(contains(scene.shared.log, "rank 1 is heard again, after 0."));
  scene.shared.log.clear();
  CHECK_EQ(scene.said_after(1.9), "");
  CHECK(contains(scene.said_after(2.1), "has been silent"));
}

TEST(heartbeat_is_lost_after_the_silence_given) {
  for (double silence : {0.5, 2.0, 30.0}) {
    Scene scene({.silence = silence});
    scene.heartbeat.heard();
    scene.said_after(silence - 0.2);
    const auto text = CHECK_THROWS(scene.said_after(silence + 0.2), ErrorKind::PeerLost);
    CHECK(contains(text, "rank 1 has been silent for") && contains(text, "init(silence=...)"));
    CHECK(contains(text, "its process is stopped, or its host or the network to it is down"));
  }
}

TEST(heartbeat_begins_with_the_first_sign_of_life) {
  Scene scene, without_heartbeats({.silence = 0});
  CHECK_EQ(scene.said_after(1000), "");
  without_heartbeats.heartbeat.heard();
  CHECK_EQ(without_heartbeats.said_after(1000), "");
}

TEST(heartbeat_counts_anew_after_an_excuse) {
  Scene scene;
  scene.heartbeat.heard();
  scene.said_after(20);
  scene.heartbeat.excuse(Clock::now() + seconds(20));
  CHECK_EQ(scene.said_after(21.9), "");
  scene.said_after(49);
  CHECK_THROWS(scene.said_after(50.1), ErrorKind::PeerLost);
}

}  // namespace syncengine::matching
