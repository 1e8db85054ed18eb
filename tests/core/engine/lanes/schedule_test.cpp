// Walks all that can happen between three ranks that announce, refuse and end the operations of two steps: access by
// access within a host, message by message between hosts, in every order. A step ends with averages on all ranks or on
// none; nobody waits for ever; nothing that runs has been refused; a step that one rank has lost after it had its
// averages, and others have not, ends the communicator.
//
// Ranks decide by never_runs() and passed_over(), as they run. Not in it: how an operation runs once it has its
// turn, wake-ups, and that a host may have several ranks where there are several hosts; instead of that, announcements,
// refusals and turns overtake each other on their way between two hosts.
#include "engine/lanes/schedule.h"

#include <array>
#include <cstring>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "test.h"

namespace syncengine {

namespace {

constexpr int kRanks = 3, kSteps = 2, kSlots = 3;
constexpr uint8_t kBucket = 0, kVote = 1, kEnd = 2;

// Where a rank raises in a step.
enum class Where : uint8_t { Nowhere, Forward, Middle, Late };
using Places = std::array<std::array<Where, kSteps>, kRanks>;

// What is taken away, or done wrong, to see that the walk finds it.
enum class Flaw : uint8_t {
  None,
  ReadsAnnouncedFirst,  // then `refused`
  EndsAtOnce,           // a rank begins the next step without waiting for the end of a refused one
  EndNotLast,           // rank 0 lets the end run beside what still waits
  NeverPassedOver,      // nobody looks for steps that were passed over
  RefusesFirst,         // `refused` is stored before the last announcement
};

struct Waiting {
  uint8_t slot, step;
  bool logged;
};

// One rank. Of a work: 0 none, 1 waits, 2 refused, from kTaken on its place in the log.
constexpr uint8_t kTaken = 10;
enum Pc : uint8_t { kBegin, kAnnounce, kRaise, kVoting, kAwaitVote, kAwaitBucket, kAnnounceEnd, kAwaitEnd, kOver };

struct Rank {
  Pc pc = kBegin;
  uint8_t step = 1, ended = 0, ended_before = 0, taken = 0;
  uint8_t work[kSlots] = {};
  uint8_t outcome[kSteps + 1] = {};  // 1: averages, 2: an error
  std::vector<Waiting> waiting;
  // Half of a look at one member: what was read first.
  bool looks = false;
  uint8_t item = 0, member = 0, first = 0;
  // Between hosts: what the others have told.
  uint8_t refused[kRanks] = {}, bitmap[kRanks] = {};
  uint8_t ready[kRanks][kSlots] = {};  // at rank 0
};

struct Refusal {
  uint8_t step, bitmap;
};

struct State {
  Rank ranks[kRanks];
  // Shared memory.
  uint8_t announced[kRanks][kSlots] = {}, refused[kRanks] = {};
  std::vector<Waiting> log;
  // On their way: announcements to rank 0, and refusals to each. Turns are told at any time.
  std::vector<Waiting> ready[kRanks];
  std::vector<Refusal> told[kRanks][kRanks];
  bool failed = false;

  std::string key() const {
    char key[1024];  // a fraction of the time that a string takes to grow by one
    size_t size = 0;
    auto add = [&](int value) {
      CHECK(size < sizeof(key));
      key[size++] = static_cast<char>(value);
    };
    auto add_items = [&](const std::vector<Waiting>& items) {
      add(static_cast<int>(items.size()));
      for (const Waiting& item : items) add(item.slot * 16 + item.step * 2 + item.logged);
    };
    for (const Rank& rank : ranks) {
      for (int value :
           {int{rank.pc}, int{rank.step}, int{rank.ended}, int{rank.ended_before}, int{rank.taken}, int{rank.looks},
            rank.looks ? rank.item * 4 + rank.member : 0, rank.looks ? int{rank.first} : 0})
        add(value);
      for (uint8_t work : rank.work) add(work);
      for (uint8_t outcome : rank.outcome) add(outcome);
      add_items(rank.waiting);
      for (int member = 0; member < kRanks; ++member) {
        add(rank.refused[member] * 16 + rank.bitmap[member]);
        for (uint8_t step : rank.ready[member]) add(step);
      }
    }
    for (int rank = 0; rank < kRanks; ++rank) {
      for (uint8_t step : announced[rank]) add(step);
      add(refused[rank]);
      add_items(ready[rank]);
      for (const auto& messages : told[rank]) {
        add(static_cast<int>(messages.size()));
        for (const Refusal& message : messages) add(message.step * 16 + message.bitmap);
      }
    }
    add_items(log);
    add(failed);
    return {key, size};
  }
};

class Explorer {
 public:
  Explorer(bool hosts, const Places& places, Flaw flaw = Flaw::None) : hosts_(hosts), places_(places), flaw_(flaw) {}

  // The number of different states. Throws at the first bad one.
  size_t explore() {
    push(State{});
    while (!open_.empty()) {
      State state = std::move(open_.back());
      open_.pop_back();
      moved_ = false;
      if (!state.failed)
        for (int rank = 0; rank < kRanks; ++rank) act(state, rank);
      if (!moved_) check_end(state);
    }
    return seen_.size();
  }

 private:
  void push(const State& state) {
    auto [at, is_new] = seen_.insert(state.key());
    if (is_new) open_.push_back(state);
    moved_ = true;
  }

  // Whether some rank has lost a step late that another one has not.
  bool is_fatal() const {
    for (int step = 0; step < kSteps; ++step) {
      int late = 0;
      for (const auto& place : places_) late += place[step] == Where::Late;
      for (const auto& place : places_)  // then the step is refused, and nobody comes so far
        if (place[step] == Where::Forward || place[step] == Where::Middle) late = 0;
      if (late > 0 && late < kRanks && step + 1 < kSteps) return true;
    }
    return false;
  }

  void check_end(const State& state) const {
    if (is_fatal() || state.failed) {
      CHECK(is_fatal() && state.failed);
      return;
    }
    for (int rank = 0; rank < kRanks; ++rank) {
      const bool waits_for_others = state.ranks[rank].pc == kAwaitEnd && state.ranks[rank].step == kSteps;
      const bool late = places_[rank][kSteps - 1] == Where::Late;  // and no further step shows that
      CHECK(state.ranks[rank].pc == kOver || (waits_for_others && late));
      CHECK(state.ranks[rank].waiting.empty() || late);
      for (int step = 1; step <= kSteps; ++step)
        CHECK_EQ(int{state.ranks[rank].outcome[step]}, int{state.ranks[0].outcome[step]});
    }
  }

  Where place(const Rank& rank, int me) const { return places_[me][rank.step - 1]; }

  void announce(State& next, int me, uint8_t slot) {
    Rank& rank = next.ranks[me];
    rank.work[slot] = 1;
    rank.waiting.push_back({slot, rank.step, false});
    next.announced[me][slot] = rank.step;
    if (hosts_) next.ready[me].push_back({slot, rank.step, false});
  }

  void refuse(State& next, int me) {
    Rank& rank = next.ranks[me];
    next.refused[me] = rank.step;
    uint8_t bitmap = 0;
    for (int slot = 0; slot < kSlots; ++slot) bitmap |= (next.announced[me][slot] == rank.step) << slot;
    for (int other = 0; other < kRanks && hosts_; ++other)
      if (other != me) next.told[me][other].push_back({rank.step, bitmap});
  }

  static void begin_next(Rank& rank) {
    std::memset(rank.work, 0, sizeof(rank.work));
    rank.pc = rank.step == kSteps ? kOver : kBegin;
    if (rank.step < kSteps) ++rank.step;
  }

  static void end(Rank& rank, uint8_t outcome) {
    CHECK(rank.outcome[rank.step] == 0);
    rank.outcome[rank.step] = outcome;
  }

  bool has_run(const State& state, uint8_t work) const {
    if (work < kTaken) return false;
    for (const Rank& rank : state.ranks)
      if (rank.taken <= work - kTaken) return false;
    return true;
  }

  void act(const State& state, int me) {
    const Rank& rank = state.ranks[me];
    if (rank.looks) return look_again(state, me);  // under the lock that the program's calls take, too
    program(state, me);
    if (hosts_) receive(state, me);
    for (size_t item = 0; item < rank.waiting.size(); ++item) {
      if (hosts_)
        judge_from_messages(state, me, item);
      else
        look(state, me, item);
      if (me == 0) append(state, item);
    }
    if (!hosts_) take(state, me);
  }

  void program(const State& state, int me) {
    State next = state;
    Rank& rank = next.ranks[me];
    switch (rank.pc) {
      case kBegin: rank.pc = place(rank, me) == Where::Forward ? kRaise : kAnnounce; break;
      case kAnnounce:
        if (flaw_ == Flaw::RefusesFirst && place(rank, me) == Where::Middle) {
          refuse(next, me);
          push(next);
          State late = next;  // the announcement comes behind
          announce(late, me, kBucket);
          end(late.ranks[me], 2);
          late.ranks[me].pc = kAnnounceEnd;
          next = late;
          break;
        }
        announce(next, me, kBucket);
        rank.pc = place(rank, me) == Where::Middle ? kRaise : kVoting;
        break;
      case kRaise:
        refuse(next, me);
        end(rank, 2);
        rank.pc = kAnnounceEnd;
        break;
      case kVoting:
        announce(next, me, kVote);
        rank.pc = kAwaitVote;
        break;
      case kAwaitVote:
        if (rank.work[kVote] == 2) {
          end(rank, 2);
          rank.pc = kAnnounceEnd;
        } else if (has_run(state, rank.work[kVote])) {
          rank.pc = kAwaitBucket;
        } else {
          return;
        }
        break;
      case kAwaitBucket:
        CHECK(rank.work[kBucket] != 2);  // the vote has run, so all have announced all
        if (!has_run(state, rank.work[kBucket])) return;
        end(rank, 1);
        if (place(rank, me) == Where::Late) {
          refuse(next, me);
          rank.pc = kAnnounceEnd;
        } else {
          begin_next(rank);
        }
        break;
      case kAnnounceEnd:
        announce(next, me, kEnd);
        rank.ended_before = std::exchange(rank.ended, rank.step);
        rank.pc = kAwaitEnd;
        if (flaw_ == Flaw::EndsAtOnce) begin_next(rank);
        break;
      case kAwaitEnd:
        if (!has_run(state, rank.work[kEnd])) return;
        begin_next(rank);
        break;
      case kOver: return;
    }
    push(next);
  }

  void set_failed(State next) {
    if (flaw_ == Flaw::NeverPassedOver) return;
    next.failed = true;
    push(next);
  }

  // The last step whose end was announced before the item's.
  static uint8_t ended_before(const Rank& rank, const Waiting& item) {
    return rank.ended == item.step ? rank.ended_before : rank.ended;
  }

  void conclude(State next, int me, size_t at, bool never, uint8_t refused) {
    Rank& rank = next.ranks[me];
    const Waiting item = rank.waiting[at];
    if (passed_over(item.step, ended_before(rank, item), refused)) return set_failed(next);
    if (!never || item.slot == kEnd) {
      rank.looks = false;
      if (next.key() != before_) push(next);
      return;
    }
    CHECK(!item.logged);
    drop(next, me, at);
    rank.looks = false;
    push(next);
  }

  void drop(State& next, int me, size_t at) {
    Rank& rank = next.ranks[me];
    const Waiting item = rank.waiting[at];
    for (const Waiting& entry : next.log) CHECK(entry.slot != item.slot || entry.step != item.step);
    if (rank.work[item.slot] == 1 && item.step == rank.step) rank.work[item.slot] = 2;
    rank.waiting.erase(rank.waiting.begin() + static_cast<long>(at));
  }

  // Within a host: two accesses for each member.
  void look(const State& state, int me, size_t at) {
    const Waiting& item = state.ranks[me].waiting[at];
    if (item.logged) return;
    for (int member = 0; member < kRanks; ++member) {
      if (member == me) continue;
      State next = state;
      Rank& rank = next.ranks[me];
      const bool reversed = flaw_ == Flaw::ReadsAnnouncedFirst;
      const uint8_t first = reversed ? state.announced[member][item.slot] : state.refused[member];
      // Nothing can come of it.
      if (!reversed && first == 0) continue;
      rank.looks = true;
      rank.item = static_cast<uint8_t>(at);
      rank.member = static_cast<uint8_t>(member);
      rank.first = first;
      // A look that finds nothing, and would not now, moves nobody on.
      const bool moved = moved_;
      push(next);
      moved_ = moved;
      if (reversed) continue;
      moved_ |= never_runs(item.step, first, state.announced[member][item.slot]) && item.slot != kEnd;
      if (flaw_ == Flaw::NeverPassedOver) continue;
      moved_ |= passed_over(item.step, ended_before(rank, item), first);
    }
  }

  void look_again(const State& state, int me) {
    const Rank& rank = state.ranks[me];
    const Waiting& item = rank.waiting[rank.item];
    const bool reversed = flaw_ == Flaw::ReadsAnnouncedFirst;
    const uint8_t second = reversed ? state.refused[rank.member] : state.announced[rank.member][item.slot];
    const uint8_t refused = reversed ? second : rank.first, announced = reversed ? rank.first : second;
    before_ = state.key();
    conclude(state, me, rank.item, never_runs(item.step, refused, announced), refused);
    moved_ = true;
  }

  // Between hosts: by what has come.
  void judge_from_messages(const State& state, int me, size_t at) {
    const Rank& rank = state.ranks[me];
    const Waiting& item = rank.waiting[at];
    if (item.logged) return;
    for (int member = 0; member < kRanks; ++member) {
      if (member == me || rank.refused[member] == 0) continue;
      const bool announced = rank.bitmap[member] >> item.slot & 1;
      before_ = state.key();
      const bool moved = std::exchange(moved_, false);
      conclude(state, me, at, never_runs(item.step, rank.refused[member], announced ? rank.refused[member] : 0),
               rank.refused[member]);
      moved_ |= moved;
    }
  }

  void receive(const State& state, int me) {
    for (int from = 0; from < kRanks; ++from) {
      if (!state.told[from][me].empty()) {
        State next = state;
        auto& messages = next.told[from][me];
        next.ranks[me].refused[from] = messages.front().step;
        next.ranks[me].bitmap[from] = messages.front().bitmap;
        messages.erase(messages.begin());
        push(next);
      }
      if (me == 0 && !state.ready[from].empty()) {
        State next = state;
        auto& messages = next.ready[from];
        next.ranks[0].ready[from][messages.front().slot] = messages.front().step;
        messages.erase(messages.begin());
        push(next);
      }
    }
    take(state, me);  // the turns, in their order, at any time
  }

  // By rank 0: what all have announced gets its turn; the end of a step behind all else of that step.
  void append(const State& state, size_t at) {
    const Rank& rank = state.ranks[0];
    const Waiting& item = rank.waiting[at];
    if (item.logged) return;
    for (int member = 0; member < kRanks; ++member) {
      const uint8_t announced = hosts_ ? rank.ready[member][item.slot] : state.announced[member][item.slot];
      if (announced != item.step) return;
    }
    if (item.slot == kEnd && flaw_ != Flaw::EndNotLast)
      for (const Waiting& other : rank.waiting)
        if (other.slot != kEnd && !other.logged) return;
    State next = state;
    next.ranks[0].waiting[at].logged = true;
    next.log.push_back({item.slot, item.step, true});
    push(next);
  }

  void take(const State& state, int me) {
    if (state.ranks[me].taken == state.log.size()) return;
    State next = state;
    Rank& rank = next.ranks[me];
    const Waiting entry = next.log[rank.taken];
    size_t at = 0;
    while (at < rank.waiting.size() && rank.waiting[at].slot != entry.slot) ++at;
    CHECK(at < rank.waiting.size());  // else it would be called a Mismatch
    CHECK_EQ(int{rank.waiting[at].step}, int{entry.step});
    CHECK_EQ(int{rank.work[entry.slot]}, 1);
    rank.work[entry.slot] = static_cast<uint8_t>(kTaken + rank.taken++);
    rank.waiting.erase(rank.waiting.begin() + static_cast<long>(at));
    // Nothing of the step runs behind its end.
    if (entry.slot == kEnd)
      while (!rank.waiting.empty()) drop(next, me, 0);
    push(next);
  }

  const bool hosts_;
  const Places places_;
  const Flaw flaw_;
  bool moved_ = false;
  std::string before_;
  std::unordered_set<std::string> seen_;
  std::vector<State> open_;
};

std::vector<Places> all_places(const std::vector<Where>& first, const std::vector<Where>& second) {
  std::vector<Places> all;
  for (Where a : first)
    for (Where b : first)
      for (Where c : first)
        for (Where d : second) all.push_back({{{a, Where::Nowhere}, {b, d}, {c, Where::Nowhere}}});
  return all;
}

size_t walk(bool hosts, const std::vector<Where>& first, const std::vector<Where>& second, Flaw flaw = Flaw::None) {
  size_t states = 0;
  for (const Places& places : all_places(first, second)) states += Explorer(hosts, places, flaw).explore();
  return states;
}

}  // namespace

TEST(refusals_within_a_host_leave_nobody_waiting) {
  const std::vector<Where> anywhere{Where::Nowhere, Where::Forward, Where::Middle, Where::Late};
  CHECK(walk(false, anywhere, {Where::Nowhere, Where::Forward, Where::Middle}) > 10000);
}

TEST(refusals_between_hosts_leave_nobody_waiting) {
  CHECK(walk(true, {Where::Nowhere, Where::Forward, Where::Middle, Where::Late}, {Where::Nowhere}) > 10000);
}

// The walk finds what it is there for.
TEST(refusal_walk_finds_what_is_missing) {
  for (Flaw flaw :
       {Flaw::ReadsAnnouncedFirst, Flaw::EndsAtOnce, Flaw::EndNotLast, Flaw::NeverPassedOver, Flaw::RefusesFirst})
    CHECK(testing::fails([&] { walk(false, {Where::Nowhere, Where::Middle, Where::Late}, {Where::Nowhere}, flaw); }));
}

}  // namespace syncengine
