// Every state and event of a peer's lifecycle, against what the states mean.
#include "transport/matching/session.h"

#include <set>
#include <string>

#include "test.h"

namespace syncengine {

using matching::Lifecycle;

namespace {

constexpr Lifecycle::LifeEvent kEvents[] = {Lifecycle::Leave, Lifecycle::SayGoodbye, Lifecycle::HearGoodbye,
                                            Lifecycle::Break};

std::string name(Lifecycle::State state) {
  switch (state) {
    case Lifecycle::Open: return "Open";
    case Lifecycle::PeerLeft: return "PeerLeft";
    case Lifecycle::Leaving: return "Leaving";
    case Lifecycle::Answering: return "Answering";
    case Lifecycle::Said: return "Said";
    case Lifecycle::Parted: return "Parted";
    case Lifecycle::Broken: return "Broken";
  }
  return "";
}

std::string name(Lifecycle::LifeEvent event) {
  return event == Lifecycle::Leave        ? "Leave"
         : event == Lifecycle::SayGoodbye ? "SayGoodbye"
                                          : "HearGoodbye";  // Break is allowed everywhere
}

// What has happened, in place of a state.
struct History {
  bool left = false, said = false, heard = false, broken = false;

  bool allows(Lifecycle::LifeEvent event) const {
    if (event == Lifecycle::SayGoodbye) return left && !said && !broken;
    return event != Lifecycle::HearGoodbye || !broken;
  }
  void add(Lifecycle::LifeEvent event) {
    if (broken) return;
    left |= event == Lifecycle::Leave;
    said |= event == Lifecycle::SayGoodbye;
    heard |= event == Lifecycle::HearGoodbye;
    broken |= event == Lifecycle::Break;
  }
  void check(const Lifecycle& life) const {
    CHECK_EQ(life.is_broken(), broken);
    CHECK_EQ(life.is_in_use(), !left && !broken);
    CHECK_EQ(life.may_send(), !said && !broken);
    CHECK_EQ(life.owes_goodbye(), left && !said && !broken);
    CHECK_EQ(life.has_peer_left(), heard && !broken);
    CHECK_EQ(life.state() == Lifecycle::Parted, said && heard && !broken);
  }
};

void walk(const Lifecycle& life, const History& history, std::set<int>& seen, int depth) {
  history.check(life);
  seen.insert(life.state());
  if (depth == 0) return;
  for (Lifecycle::LifeEvent event : kEvents) {
    CHECK_EQ(Lifecycle::next(life.state(), event).has_value(), history.allows(event));
    Lifecycle next = life;
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
  CHECK_EQ(seen.size(), size_t{Lifecycle::Broken} + 1);
}

}  // namespace syncengine
