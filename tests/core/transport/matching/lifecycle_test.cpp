// Every state and event of a peer's lifecycle, against what the states mean.
#include "transport/matching/session.h"

#include <set>
#include <string>

#include "test.h"

namespace syncengine {

using matching::ConnectionLifecycle;

namespace {

constexpr ConnectionLifecycle::LifeEvent kEvents[] = {ConnectionLifecycle::Leave, ConnectionLifecycle::SayGoodbye,
                                                      ConnectionLifecycle::HearGoodbye, ConnectionLifecycle::Break};

std::string name(ConnectionLifecycle::State state) {
  switch (state) {
    case ConnectionLifecycle::Open: return "Open";
    case ConnectionLifecycle::PeerLeft: return "PeerLeft";
    case ConnectionLifecycle::Leaving: return "Leaving";
    case ConnectionLifecycle::Answering: return "Answering";
    case ConnectionLifecycle::Said: return "Said";
    case ConnectionLifecycle::Parted: return "Parted";
    case ConnectionLifecycle::Broken: return "Broken";
  }
  return "";
}

std::string name(ConnectionLifecycle::LifeEvent event) {
  return event == ConnectionLifecycle::Leave        ? "Leave"
         : event == ConnectionLifecycle::SayGoodbye ? "SayGoodbye"
                                                    : "HearGoodbye";  // Break is allowed everywhere
}

// What has happened, in place of a state.
struct History {
  bool left = false, said = false, heard = false, broken = false;

  bool allows(ConnectionLifecycle::LifeEvent event) const {
    if (event == ConnectionLifecycle::SayGoodbye) return left && !said && !broken;
    return event != ConnectionLifecycle::HearGoodbye || !broken;
  }
  void add(ConnectionLifecycle::LifeEvent event) {
    if (broken) return;
    left |= event == ConnectionLifecycle::Leave;
    said |= event == ConnectionLifecycle::SayGoodbye;
    heard |= event == ConnectionLifecycle::HearGoodbye;
    broken |= event == ConnectionLifecycle::Break;
  }
  void check(const ConnectionLifecycle& life) const {
    CHECK_EQ(life.is_broken(), broken);
    CHECK_EQ(life.is_in_use(), !left && !broken);
    CHECK_EQ(life.may_send(), !said && !broken);
    CHECK_EQ(life.owes_goodbye(), left && !said && !broken);
    CHECK_EQ(life.has_peer_left(), heard && !broken);
    CHECK_EQ(life.state() == ConnectionLifecycle::Parted, said && heard && !broken);
  }
};

void walk(const ConnectionLifecycle& life, const History& history, std::set<int>& seen, int depth) {
  history.check(life);
  seen.insert(life.state());
  if (depth == 0) return;
  for (ConnectionLifecycle::LifeEvent event : kEvents) {
    CHECK_EQ(ConnectionLifecycle::next(life.state(), event).has_value(), history.allows(event));
    ConnectionLifecycle next = life;
    if (!history.allows(event)) {
      bool thrown = false;
      try {
        next.on(event);
      } catch (const Error& error) {
        thrown = true;
        CHECK(
            std::string(error.what()).ends_with(" is " + name(life.state()) + ", which does not allow " + name(event)));
      }
      CHECK(thrown && next.state() == life.state());
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
  CHECK_EQ(seen.size(), size_t{ConnectionLifecycle::Broken} + 1);
}

}  // namespace syncengine
