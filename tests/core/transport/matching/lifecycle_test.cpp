// Every state and event of a peer's lifecycle, against what the states mean.
#include "transport/matching/session.h"

#include <map>
#include <set>
#include <string>

#include "test.h"

namespace syncengine {

namespace {

using Life = matching::ConnectionLifecycle;

const std::map<Life::State, std::string> kStates = {
    {Life::Open, "Open"}, {Life::PeerLeft, "PeerLeft"}, {Life::Leaving, "Leaving"}, {Life::Answering, "Answering"},
    {Life::Said, "Said"}, {Life::Parted, "Parted"},     {Life::Broken, "Broken"}};
const std::map<Life::LifeEvent, std::string> kEvents = {{Life::Leave, "Leave"},
                                                        {Life::SayGoodbye, "SayGoodbye"},
                                                        {Life::HearGoodbye, "HearGoodbye"},
                                                        {Life::Break, "Break"}};

// What has happened, in place of a state.
struct History {
  bool left = false, said = false, heard = false, broken = false;

  bool allows(Life::LifeEvent event) const {
    if (event == Life::SayGoodbye) return left && !said && !broken;
    return event != Life::HearGoodbye || !broken;
  }
  void add(Life::LifeEvent event) {
    if (broken) return;
    left |= event == Life::Leave;
    said |= event == Life::SayGoodbye;
    heard |= event == Life::HearGoodbye;
    broken |= event == Life::Break;
  }
  void check(const Life& life) const {
    CHECK_EQ(life.is_broken(), broken);
    CHECK_EQ(life.is_in_use(), !left && !broken);
    CHECK_EQ(life.may_send(), !said && !broken);
    CHECK_EQ(life.owes_goodbye(), left && !said && !broken);
    CHECK_EQ(life.has_peer_left(), heard && !broken);
    CHECK_EQ(life.state() == Life::Parted, said && heard && !broken);
  }
};

void walk(const Life& life, const History& history, std::set<int>& seen, int depth) {
  history.check(life);
  seen.insert(life.state());
  if (depth == 0) return;
  for (const auto& [event, name] : kEvents) {
    CHECK_EQ(Life::next(life.state(), event).has_value(), history.allows(event));
    Life next = life;
    if (!history.allows(event)) {
      const auto text = CHECK_THROWS(next.on(event), ErrorKind::Aborted);
      CHECK_EQ(text.substr(text.find(" is ")), " is " + kStates.at(life.state()) + ", which does not allow " + name);
      CHECK(next.state() == life.state());
      continue;
    }
    next.on(event);
    History longer = history;
    longer.add(event);
    walk(next, longer, seen, depth - 1);
  }
}

}  // namespace

TEST(a_lifecycle_is_what_has_happened) {
  std::set<int> seen;
  walk({}, {}, seen, 6);
  CHECK_EQ(seen.size(), size_t{Life::Broken} + 1);
}

}  // namespace syncengine
