// The agreement of Communicator::shrink(): every interleaving of three members, of whom up to two die, leave or hang at
// any point, each read and write a step of its own.

#include "engine/communicator/succession.h"

#include <array>
#include <cstdio>
#include <deque>
#include <map>
#include <vector>

#include "test.h"

namespace syncengine {

namespace {

constexpr int kMembers = 3;
constexpr uint64_t kEverybody = (1 << kMembers) - 1;

// What EngineCommunicator::await_decision() does, word by word.
struct Member {
  enum Place : uint8_t { Computing, Deciding, Reading, Proposing, Joined, Fenced };
  uint8_t place = Computing;
  uint8_t next = 0;  // of the reads: the decision, then of each member whether it is dead, and whether it has arrived
  uint8_t decided = 0, arrived = 0, gone = 0, members = 0;
  bool dead = false, left = false, impatient = false;
  auto operator<=>(const Member&) const = default;
  bool over() const { return dead || left || place == Joined || place == Fenced; }
};

struct World {
  std::array<Member, kMembers> members;
  uint8_t decision = 0, arrived = 0, never = 0;
  uint8_t losses = 0;
  bool anybody_impatient = false;
  auto operator<=>(const World&) const = default;
};

void step(World& world, int me) {
  Member& member = world.members[me];
  const auto bit = static_cast<uint8_t>(1 << me);
  switch (member.place) {
    case Member::Computing:
      world.arrived |= bit;
      member.place = Member::Deciding;
      return;
    case Member::Deciding:
      member.decided = world.decision;
      member.next = member.arrived = member.gone = 0;
      member.place = Member::Reading;
      return;
    case Member::Reading: {
      const int other = member.next / 2;
      const auto its = static_cast<uint8_t>(1 << other);
      if (member.next % 2 == 0) {
        if (world.members[other].dead) member.gone |= its;
      } else {
        if (world.never & its) member.gone |= its;
        if (world.arrived & its) member.arrived |= its;
      }
      if (++member.next < 2 * kMembers) return;
      const auto [what, members] =
          succeed(me, kEverybody, member.decided, member.arrived, member.gone, member.impatient);
      member.members = static_cast<uint8_t>(members);
      member.place = what == Succession::Do::Look      ? Member::Deciding
                     : what == Succession::Do::Propose ? Member::Proposing
                     : what == Succession::Do::Join    ? Member::Joined
                                                       : Member::Fenced;
      if (member.place != Member::Joined && member.place != Member::Proposing) member.members = 0;
      member.next = member.decided = member.arrived = member.gone = 0;
      return;
    }
    case Member::Proposing:
      if (world.decision == 0) world.decision = member.members;
      member.members = 0;
      member.place = Member::Deciding;
      return;
  }
}

std::vector<World> successors(const World& world) {
  std::vector<World> all;
  for (int me = 0; me < kMembers; ++me) {
    const Member& member = world.members[me];
    if (member.dead || member.left) continue;
    if (!member.over()) step(all.emplace_back(world), me);
    if (world.losses < 2) {
      World& killed = all.emplace_back(world);
      ++killed.losses;
      killed.members[me] = {.place = member.place, .members = member.members, .dead = true};
    }
    if (world.losses < 2 && member.place == Member::Computing) {
      World& gone = all.emplace_back(world);
      ++gone.losses;
      gone.members[me].left = true;
      gone.never |= static_cast<uint8_t>(1 << me);
    }
    if (!member.over() && !member.impatient) {
      World& late = all.emplace_back(world);
      late.members[me].impatient = late.anybody_impatient = true;
    }
  }
  return all;
}

void check(const World& world) {
  int joined = 0;
  for (int me = 0; me < kMembers; ++me) {
    const Member& member = world.members[me];
    if (member.place == Member::Joined) {
      CHECK(joined == 0 || joined == member.members);  // also those who died since: they may have told the world
      joined = member.members;
      CHECK(member.members >> me & 1);
      CHECK_EQ(member.members & ~world.arrived, 0);  // the place of each is known
    }
    if (member.place == Member::Fenced) CHECK(world.anybody_impatient);
    if (member.place == Member::Fenced) CHECK(!(world.decision >> me & 1));
  }
  if (joined != 0) CHECK_EQ(joined, static_cast<int>(world.decision));
}

TEST(succession_agrees_in_every_interleaving) {
  std::map<World, int> number;
  std::vector<World> worlds;
  std::vector<std::vector<int>> before;
  std::deque<int> over;
  auto add = [&](const World& world, int from) {
    auto [found, is_new] = number.try_emplace(world, static_cast<int>(worlds.size()));
    if (is_new) {
      check(world);
      worlds.push_back(world);
      before.emplace_back();
      bool all = true;
      for (const Member& member : world.members) all &= member.over();
      if (all) over.push_back(found->second);
    }
    if (from >= 0) before[found->second].push_back(from);
  };
  add({}, -1);
  for (size_t at = 0; at < worlds.size(); ++at)
    for (const World& next : successors(World(worlds[at]))) add(next, static_cast<int>(at));
  // From everywhere there is a way to the end.
  std::vector<bool> ends(worlds.size());
  size_t count = 0;
  while (!over.empty()) {
    const int at = over.front();
    over.pop_front();
    if (ends[at]) continue;
    ends[at] = true;
    ++count;
    for (int from : before[at]) over.push_back(from);
  }
  CHECK_EQ(count, worlds.size());
  std::printf("  succession: %zu states\n", worlds.size());
}

// Where nobody dies, but slowly, all are still there afterwards.
TEST(succession_leaves_nobody_out_who_comes_in_time) {
  CHECK(succeed(0, 7, 0, 3, 0, false).what == Succession::Do::Look);
  CHECK(succeed(0, 7, 0, 7, 0, false).what == Succession::Do::Propose);
  CHECK_EQ(succeed(0, 7, 0, 7, 0, false).members, uint64_t{7});
  CHECK_EQ(succeed(0, 7, 0, 7, 4, false).members, uint64_t{3});  // died after it had arrived
  CHECK_EQ(succeed(0, 7, 0, 3, 0, true).members, uint64_t{3});
  CHECK(succeed(0, 7, 6, 7, 0, true).what == Succession::Do::Fenced);
}

}  // namespace

}  // namespace syncengine
