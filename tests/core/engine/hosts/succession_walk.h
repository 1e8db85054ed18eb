// Every order of what may happen in the agreement of Communicator::shrink(), to members on one host and on several, of
// whom some die, leave or hang at any point, and of whose connections some are cut, one way or both. Each access to
// what a host shares is a step of its own, and so is each message, which may come late, or never if its sender has died
// since or the connection was cut.
//
// Thread-safety: one thread. Failure: throws testing::Failure.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "engine/hosts/succession.h"
#include "state_numbers.h"
#include "test.h"

namespace syncengine::succession_walk {

constexpr int kMost = 3;

// What await_decision() and look_around() do in EngineCommunicator::shrink(), word by word.
struct Member {
  enum Place : uint8_t { Computing, Word, Members, Reading, Telling, Looked, Acting, Joined, Fenced, Few };
  uint8_t place = Computing;
  uint8_t next = 0;  // whom to look at, or to tell
  uint8_t word = 0, members = 0, arrived = 0, gone = 0;
  uint8_t told_word = 0, told_members = 0;
  uint8_t what = 0, value = 0;
  uint8_t lost = 0, ended = 0;  // members of other hosts, as far as this one knows; `ended` are some of the lost
  uint8_t heard_word[kMost] = {}, heard_members[kMost] = {};
  uint8_t dead = false, left = false;
  bool over() const { return dead || left || place >= Joined; }
  bool is_there() const { return !dead && !left; }
};

constexpr int kQueue = 8;

struct Channel {
  uint8_t count = 0;
  uint8_t words[kQueue] = {}, members[kQueue] = {};
};

struct World {
  Member members[kMost];
  Channel channels[kMost][kMost];              // from, to
  uint8_t word[kMost] = {}, list[kMost] = {};  // of each host, by all of its members
  uint8_t arrived = 0, never = 0;
  uint8_t losses = 0, suspicions = 0, cuts = 0;
  uint8_t down[kMost] = {};  // of each, those of whom nothing comes any more: the dead, and the cut off
  uint8_t padding[5] = {};
};
class Walk {
 public:
  // `hosts`: of each its members. So many losses, so often somebody is impatient, and so many connections are cut.
  Walk(std::vector<uint64_t> hosts, int losses, int suspicions, int cuts)
      : hosts_(std::move(hosts)), losses_(losses), suspicions_(suspicions), cuts_(cuts) {
    for (size_t host = 0; host < hosts_.size(); ++host)
      for (int member = 0; member < kMost; ++member)
        if (hosts_[host] >> member & 1) host_of_[member] = static_cast<int>(host), size_ = std::max(size_, member + 1);
  }

  size_t run() {
    add({}, -1);
    for (int at = 0; !frontier_.empty(); ++at) {
      const World world = frontier_.front();
      frontier_.pop_front();
      successors(world, at);
    }
    check_ends();
    return numbers_.size();
  }

 private:
  static uint8_t bit(int of) { return static_cast<uint8_t>(1 << of); }
  bool is_remote(int me, int other) const { return host_of_[me] != host_of_[other]; }
  bool alone(int me) const { return (hosts_[host_of_[me]] & (hosts_[host_of_[me]] - 1)) == 0; }

  Succession asked(const Member& member, int me, bool impatient) const {
    Outlook sees{.me = me, .host = static_cast<size_t>(host_of_[me]), .hosts = hosts_, .others = {}};
    sees.own = {.members = member.members, .word = member.word};
    sees.others.resize(hosts_.size());
    for (int other = 0; other < size_; ++other) {
      if (!is_remote(me, other)) continue;
      auto& [members, word] = sees.others[host_of_[other]];
      const uint64_t decided = uint64_t{1} << host_of_[other];
      members |= member.heard_members[other];
      if (!(word & decided))
        word = member.heard_word[other] & decided ? member.heard_word[other] : word | member.heard_word[other];
    }
    sees.arrived = member.arrived;
    sees.gone = member.gone | member.lost;
    sees.ended = member.gone | member.ended;
    sees.impatient = sees.tired = impatient;
    return succeed(sees);
  }

  // Of a member whose program goes on.
  void step(World& world, int me, bool impatient) const {
    Member& member = world.members[me];
    const int host = host_of_[me];
    switch (member.place) {
      case Member::Computing:
        world.arrived |= bit(me);
        member.place = Member::Word;
        return;
      case Member::Word:
        member.word = world.word[host];
        member.place = Member::Members;
        if (!alone(me)) return;
        [[fallthrough]];
      case Member::Members:
        member.members = world.list[host];
        member.place = Member::Reading;
        // Once there is a list, nobody asks who of this host is there.
        member.next = static_cast<uint8_t>((member.members & hosts_[host]) != 0 ? size_ : 0);
        if (!alone(me) && member.next == 0) return;
        [[fallthrough]];
      case Member::Reading:
        for (; member.next < size_; ++member.next) {
          const int other = member.next;
          if (is_remote(me, other)) continue;
          if (world.members[other].dead || world.never & bit(other)) member.gone |= bit(other);
          if (world.arrived & bit(other)) member.arrived |= bit(other);
          if (other != me) {
            ++member.next;
            return;
          }
        }
        member.next = 0;
        {
          const HostVerdict tells = to_tell({member.members, member.word}, host, hosts_[host]);
          member.place = tells == HostVerdict{member.told_members, member.told_word} ? Member::Looked : Member::Telling;
          if (member.place == Member::Looked) return;
          member.told_word = static_cast<uint8_t>(tells.word);
          member.told_members = static_cast<uint8_t>(tells.members);
        }
        [[fallthrough]];
      case Member::Telling:
        while (member.next < size_ && !is_remote(me, member.next)) ++member.next;
        if (member.next < size_) {
          const int other = member.next++;
          Channel& channel = world.channels[me][other];
          CHECK(channel.count < kQueue);
          if (!(world.down[other] & bit(me))) {
            channel.words[channel.count] = member.told_word;
            channel.members[channel.count++] = member.told_members;
          }
        }
        while (member.next < size_ && !is_remote(me, member.next)) ++member.next;
        if (member.next == size_) member.place = Member::Looked, member.next = 0;
        return;
      case Member::Looked: {
        for (int other = 0; other < size_; ++other) world.list[host] |= member.heard_members[other];
        const auto [what, value] = asked(member, me, impatient);
        member.what = static_cast<uint8_t>(what);
        member.value = static_cast<uint8_t>(value);
        const uint8_t word = member.word;
        member.word = member.members = member.arrived = member.gone = 0;
        switch (what) {
          case Succession::Do::Look: member.place = Member::Word; break;
          case Succession::Do::List: member.place = Member::Acting; break;
          case Succession::Do::State: member.place = Member::Acting, member.word = word; break;
          case Succession::Do::Join: member.place = Member::Joined; break;
          case Succession::Do::Fenced: member.place = Member::Fenced; break;
          case Succession::Do::Few: member.place = Member::Few; break;
        }
        if (member.place == Member::Word) member.what = member.value = 0;
        return;
      }
      case Member::Acting:
        if (member.what == static_cast<uint8_t>(Succession::Do::List)) {
          if ((world.list[host] & hosts_[host]) == 0) world.list[host] |= member.value;
        } else if (world.word[host] == member.word) {
          world.word[host] = member.value;
        }
        member.what = member.value = member.word = 0;
        member.place = Member::Word;
        return;
    }
  }

  // A step, and of a member that is alone on its host a whole look: nobody sees it but by its messages, of which the
  // last are lost where it dies.
  void look(World& world, int me, bool impatient) const {
    const Member& member = world.members[me];
    do step(world, me, impatient);
    while (alone(me) && !member.over() && member.place != Member::Looked);
  }

  // Whether nothing will change by itself: then somebody will lose patience, however often that has been.
  bool at_rest(const World& world) const {
    if (world.suspicions + world.cuts == 0) return false;
    for (int me = 0; me < size_; ++me) {
      if (world.members[me].over()) continue;
      for (int other = 0; other < size_; ++other) {
        if (!is_remote(me, other)) continue;
        if (world.channels[other][me].count > 0 || world.down[me] & ~world.members[me].lost & bit(other)) return false;
        if (world.members[other].dead && !(world.members[me].ended & bit(other))) return false;
      }
      World next = world;
      while (next.members[me].place != Member::Looked) {
        if (next.members[me].place == Member::Acting || next.members[me].place == Member::Telling) return false;
        step(next, me, false);
      }
      if (asked(next.members[me], me, false).what != Succession::Do::Look) return false;
    }
    return true;
  }

  void successors(const World& world, int from) {
    for (int me = 0; me < size_; ++me) {
      const Member& member = world.members[me];
      if (member.is_there()) {
        if (!member.over()) {
          World next = world;
          look(next, me, false);
          add(next, from);
          if (member.place == Member::Looked && (world.suspicions < suspicions_ || at_rest(world)) &&
              asked(member, me, false).what == Succession::Do::Look &&  // else something has changed
              asked(member, me, true).what != Succession::Do::Look) {
            World late = world;
            look(late, me, true);
            if (late.suspicions < suspicions_) ++late.suspicions;
            add(late, from);
          }
        }
        if (world.losses < losses_) lose(world, me, from);
      }
      for (int other = 0; other < size_; ++other) {
        if (!is_remote(me, other)) continue;
        travel(world, me, other, from);
        if (world.cuts < cuts_ && !(world.down[me] & bit(other))) cut(world, me, other, from);
      }
    }
  }

  // What comes from `other` is lost from here on, or what goes there, too. Whoever notices closes its side.
  void cut(const World& world, int me, int other, int from) {
    if (world.members[me].over() || !world.members[other].is_there()) return;
    World one_way = world;
    ++one_way.cuts;
    one_way.down[me] |= bit(other);
    add(one_way, from);
    one_way.down[other] |= bit(me);
    if (me < other && !world.members[other].over()) add(one_way, from);
  }

  void lose(const World& world, int me, int from) {
    const Member& member = world.members[me];
    World killed = world;
    ++killed.losses;
    killed.members[me] = {.place = member.place >= Member::Joined ? member.place : uint8_t{Member::Computing},
                          .value = member.place == Member::Joined ? member.value : uint8_t{0},
                          .dead = true};
    for (int other = 0; other < size_; ++other) {
      killed.channels[other][me] = {};
      if (is_remote(me, other)) killed.down[other] |= bit(me), killed.down[me] |= bit(other);
    }
    add(killed, from);
    if (member.place != Member::Computing || hosts_.size() > 1) return;
    World gone = world;
    ++gone.losses;
    gone.members[me].left = true;
    gone.never |= bit(me);
    add(gone, from);
  }

  // Messages from `me` to `other`, in their order.
  void travel(const World& world, int me, int other, int from) {
    if (world.members[other].over()) return;
    const Channel& channel = world.channels[me][other];
    if (channel.count > 0) {
      World came = world;
      Channel& rest = came.channels[me][other];
      came.members[other].heard_word[me] = rest.words[0];
      came.members[other].heard_members[me] = rest.members[0];
      std::memmove(rest.words, rest.words + 1, kQueue - 1);
      std::memmove(rest.members, rest.members + 1, kQueue - 1);
      --rest.count;
      rest.words[kQueue - 1] = rest.members[kQueue - 1] = 0;
      add(came, from);
      if (!(world.down[other] & bit(me))) return;
      World lost = world;
      Channel& cut = lost.channels[me][other];
      --cut.count;
      cut.words[cut.count] = cut.members[cut.count] = 0;
      add(lost, from);
    } else if (world.down[other] & ~world.members[other].lost & bit(me)) {
      World known = world;
      known.members[other].lost |= bit(me);
      known.down[me] |= bit(other);
      add(known, from);
    } else if (world.members[me].dead && !(world.members[other].ended & bit(me))) {
      World known = world;
      known.members[other].ended |= bit(me);  // its port refuses
      add(known, from);
    }
  }

  void check(const World& world) const {
    int joined[kMost] = {};
    for (int me = 0; me < size_; ++me) {
      const Member& member = world.members[me];
      if (member.place == Member::Joined) {
        CHECK(member.value >> me & 1);
        CHECK_EQ(member.value & ~world.arrived, 0);  // the place of each is known
        if (!member.dead || hosts_.size() == 1) joined[me] = member.value;
      }
      if (member.place == Member::Fenced || member.place == Member::Few) CHECK(world.suspicions + world.cuts > 0);
    }
    for (int one = 0; one < size_; ++one) {
      for (int other = 0; other < size_; ++other) {
        if (joined[one] == 0 || joined[other] == 0 || joined[one] == joined[other]) continue;
        // Only where somebody was given up who lived: he waits for the others, without whom he can't go on.
        CHECK(world.suspicions + world.cuts > 0 && hosts_.size() > 1);
        const int more = joined[one] | joined[other], less = joined[one] & joined[other];
        CHECK(more == joined[one] || more == joined[other]);
        const int missing = std::popcount(static_cast<unsigned>(more)) - 2 * std::popcount(static_cast<unsigned>(less));
        CHECK(missing < 0 || (missing == 0 && (less & more & -more) != 0));
      }
    }
  }

  // Where nobody has died or was given up early, two of three hosts go on together, whatever connection was cut. Of
  // two, one host may find only in the next shrink that it goes on alone.
  void check_end(const World& world) const {
    if (world.losses + world.suspicions > 0) return;
    int most = 0;
    for (int me = 0; me < size_; ++me) {
      const int part = world.members[me].place == Member::Joined ? world.members[me].value : 0;
      int together = 0;
      for (int other = 0; other < size_; ++other)
        together += world.members[other].place == Member::Joined && world.members[other].value == part;
      if (part != 0) most = std::max(most, together);
    }
    CHECK(most >= (hosts_.size() == 3 ? 2 : 1));
  }

  // From everywhere there is a way to the end; and where nobody was given up, all who are there have joined by then.
  void check_ends() {
    std::vector<std::vector<int>> before(numbers_.size());
    for (auto [from, to] : edges_) before[to].push_back(from);
    std::vector<bool> ends(numbers_.size());
    size_t count = 0;
    while (!over_.empty()) {
      const int at = over_.front();
      over_.pop_front();
      if (ends[at]) continue;
      ends[at] = true;
      ++count;
      for (int from : before[at]) over_.push_back(from);
    }
    CHECK_EQ(count, numbers_.size());
  }

  void add(World world, int from) {
    for (int me = 0; me < size_; ++me) {  // what nobody looks at any more
      Member& member = world.members[me];
      if (!member.over()) continue;
      member = {.place = member.place, .value = member.value, .dead = member.dead, .left = member.left};
      world.down[me] = 0;
      for (int other = 0; other < size_; ++other) world.channels[other][me] = {};
    }
    const auto [number, is_new] = numbers_.number(world);
    if (from >= 0) edges_.emplace_back(from, number);
    if (!is_new) return;
    check(world);
    frontier_.push_back(world);
    bool all = true;
    for (int me = 0; me < size_; ++me) all &= world.members[me].over();
    if (!all) return;
    check_end(world);
    over_.push_back(number);
  }

  const std::vector<uint64_t> hosts_;
  const int losses_, suspicions_, cuts_;
  int host_of_[kMost] = {}, size_ = 0;
  StateNumbers<World> numbers_;
  std::deque<World> frontier_;
  std::deque<int> over_;
  std::vector<std::pair<int, int>> edges_;
};

}  // namespace syncengine::succession_walk
