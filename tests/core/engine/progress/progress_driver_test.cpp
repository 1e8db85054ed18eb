// Walks all that can happen between an engine's own thread and threads of the program: access by access, in every
// order. No work is left lying while nobody drives, nobody waits for a driver that sleeps, two never drive, and stop()
// ends the own thread.
//
// The own thread's acts are Driver::next(), as it runs. What the others do is written down here, from Driver's,
// Engine's and Network's methods. Not in it: passes and steps themselves, and how several threads of the program sleep
// on the bell.
#include "engine/progress/driver.h"

#include <set>
#include <string>
#include <vector>

#include "test.h"

namespace syncengine {

namespace {

using Kind = Driver::Kind;
using Next = Driver::ThreadAct (*)(Kind, Driver::ThreadAct, bool);

// One access each, of a thread of the program.
enum Op : uint8_t {
  kSubmit,     // a work is outstanding; between hosts: something is to be sent
  kEnter,      // enter()
  kClaim,      // claim(): goes to the end of its program if another one drives
  kVisit,      // visit()
  kInterrupt,  // wakes the own thread from a step, unless it is parked
  kLock,       // the right to make steps
  kWork,       // drives: ends what is outstanding
  kListen,     // sleeps on the bell, or
  kUnlisten,   // has slept
  kUnlock,
  kLeave,         // leave()
  kSkipIfIdle,    // to the end, if nothing is outstanding
  kSkipIfDriven,  // to the end, if somebody drives
  kSkipIfHeard,   // to the end, if somebody listens, who is rung then
  kCall,          // call(): counts it, then
  kWake,          // wakes the own thread if it is parked
  kAlarm,         // wakes whoever is in a step
  kAwaitOthers,   // until all other programs have ended
  kStop,          // stop(), without its call()
};
using Program = std::vector<Op>;

const Program kRun = {kSubmit, kEnter, kListen, kUnlisten, kWork, kLeave, kSkipIfIdle, kCall, kWake};  // run()
const Program kPoke = {kSubmit, kVisit, kSkipIfHeard, kCall, kWake};                                   // submit()
const Program kCarry = {kClaim, kVisit,      kInterrupt,    kLock, kWork, kUnlock,
                        kLeave, kSkipIfIdle, kSkipIfDriven, kCall, kWake};  // wait() between hosts
const Program kPost = {kSubmit, kAlarm, kSkipIfDriven, kCall, kWake};       // submit() between hosts
const Program kEnd = {kAwaitOthers, kStop, kCall, kWake, kAlarm};

// The own thread while it drives, beyond Driver's acts.
enum Turn : uint8_t { kNoTurn, kToLock, kInStep, kListening };

struct State {
  std::vector<uint8_t> at;  // each program
  uint8_t work = 0, drivers = 0, visits = 0, calls = 0, listeners = 0;
  bool parked = false, stopped = false, alarm = false;
  uint8_t owner = 0;  // of the right to make steps: 1 is the own thread, then the programs
  Driver::ThreadAct act = Driver::ThreadAct::Ticket;
  Turn turn = kNoTurn;
  uint8_t ticket = 0, visits_seen = 0;
  bool called = false, asleep = false;

  std::string key() const {
    std::string key(at.begin(), at.end());
    for (int value :
         {int{work}, int{drivers}, int{visits}, int{calls}, int{listeners}, int{parked}, int{stopped}, int{alarm},
          int{owner}, static_cast<int>(act), int{turn}, int{ticket}, int{visits_seen}, int{called}, int{asleep}})
      key += static_cast<char>(value);
    return key;
  }
};

class Explorer {
 public:
  Explorer(Kind kind, std::vector<Program> programs, Next next = Driver::next)
      : kind_(kind), programs_(std::move(programs)), next_(next) {}

  // The number of different states. Throws at the first bad one.
  size_t explore() {
    State first;
    first.at.assign(programs_.size(), 0);
    push(first);
    while (!open_.empty()) {
      State state = std::move(open_.back());
      open_.pop_back();
      bool moved = false;
      for (size_t thread = 0; thread < programs_.size(); ++thread) moved |= act(state, thread);
      check(state, own_thread(state) || moved, moved);
    }
    return seen_.size();
  }

 private:
  void push(const State& state) {
    if (seen_.insert(state.key()).second) open_.push_back(state);
  }
  bool has_ended(const State& state, size_t thread) const { return state.at[thread] == programs_[thread].size(); }

  void check(const State& state, bool moves, bool program_moves) const {
    CHECK(kind_ == Kind::Handed || state.drivers <= 1);
    if (program_moves) return;
    // From here on only the own thread moves, by itself or once a doze has ended.
    for (size_t thread = 0; thread < programs_.size(); ++thread) CHECK(has_ended(state, thread) || moves);
    if (moves) return;
    if (state.stopped)
      CHECK(state.act == Driver::ThreadAct::End);
    else
      CHECK_EQ(int{state.work}, 0);
  }

  // All that the own thread may do next. False: nothing, until others do.
  bool own_thread(const State& state) {
    State next = state;
    if (state.turn != kNoTurn) return drive(next);
    bool answer = false;
    switch (state.act) {
      case Driver::ThreadAct::Ticket:
        next.called = state.ticket != state.calls;
        next.ticket = state.calls;
        break;
      case Driver::ThreadAct::Park: next.parked = true; break;
      case Driver::ThreadAct::AskStopped: answer = state.stopped; break;
      case Driver::ThreadAct::AskWork: answer = kind_ == Kind::Found || state.work > 0; break;
      case Driver::ThreadAct::AskDriven:
      case Driver::ThreadAct::AskAgain: answer = state.drivers > 0; break;
      case Driver::ThreadAct::AskCalled: answer = state.called; break;
      case Driver::ThreadAct::AskVisited:
        answer = state.visits_seen != state.visits;
        next.visits_seen = state.visits;
        break;
      case Driver::ThreadAct::Sleep:
        if (state.asleep) return false;
        if (state.ticket == state.calls) {
          next.asleep = true;
          push(next);
          return true;
        }
        break;
      case Driver::ThreadAct::Doze: break;  // how long it lasts is left open
      case Driver::ThreadAct::Hush:
      case Driver::ThreadAct::Unpark: next.parked = false; break;
      case Driver::ThreadAct::Drive:
        next.turn = kind_ == Kind::Found ? kToLock : kListening;
        next.work = 0;
        if (kind_ == Kind::Found) next.work = state.work;
        next.listeners += kind_ == Kind::Handed;
        push(next);
        return true;
      case Driver::ThreadAct::End: return false;
    }
    next.act = next_(kind_, state.act, answer);
    push(next);
    return true;
  }

  bool drive(State& next) {
    switch (next.turn) {
      case kToLock:
        if (next.owner) return false;
        next.owner = 1;
        next.turn = kInStep;
        break;
      case kInStep:
        if (!next.alarm) return false;
        next.alarm = false;
        next.work = 0;
        next.owner = 0;
        next.turn = kNoTurn;
        next.act = next_(kind_, Driver::ThreadAct::Drive, false);
        break;
      default:  // it wakes up by itself, to look around
        --next.listeners;
        next.turn = kNoTurn;
        next.act = next_(kind_, Driver::ThreadAct::Drive, false);
    }
    push(next);
    return true;
  }

  // False if it has ended, or has to wait.
  bool act(const State& state, size_t thread) {
    if (has_ended(state, thread)) return false;
    State next = state;
    ++next.at[thread];
    auto skip_if = [&](bool skip) {
      if (skip) next.at[thread] = static_cast<uint8_t>(programs_[thread].size());
    };
    const auto me = static_cast<uint8_t>(thread + 2);
    switch (programs_[thread][state.at[thread]]) {
      case kSubmit: ++next.work; break;
      case kEnter: ++next.drivers; break;
      case kClaim:
        skip_if(state.drivers > 0);
        next.drivers = 1;
        break;
      case kVisit: ++next.visits; break;
      case kInterrupt: next.alarm |= !state.parked; break;
      case kLock:
        if (state.owner) return false;
        next.owner = me;
        break;
      case kWork:
        push(next);  // or it can do nothing yet
        next.work = 0;
        next.alarm = false;
        break;
      case kListen: ++next.listeners; break;
      case kUnlisten: --next.listeners; break;
      case kUnlock: next.owner = 0; break;
      case kLeave: --next.drivers; break;
      case kSkipIfIdle: skip_if(state.work == 0); break;
      case kSkipIfDriven: skip_if(state.drivers > 0); break;
      case kSkipIfHeard: skip_if(state.listeners > 0); break;
      case kCall: ++next.calls; break;
      case kWake:
        if (state.asleep && state.parked) {
          next.asleep = false;
          next.act = next_(kind_, state.act, false);
        }
        break;
      case kAlarm: next.alarm = true; break;
      case kAwaitOthers:
        for (size_t other = 0; other < programs_.size(); ++other)
          if (other != thread && !has_ended(state, other)) return false;
        break;
      case kStop: next.stopped = true; break;
    }
    push(next);
    return true;
  }

  Kind kind_;
  std::vector<Program> programs_;
  Next next_;
  std::set<std::string> seen_;
  std::vector<State> open_;
};

bool finds(Kind kind, std::vector<Program> programs, Next next = Driver::next) {
  return testing::fails([&] { Explorer(kind, std::move(programs), next).explore(); });
}

Program without(Program program, Op op) {
  std::erase(program, op);
  return program;
}

}  // namespace

TEST(driver_leaves_no_work) {
  for (auto [kind, one] : {std::pair{Kind::Handed, std::vector{kRun, kPoke}}, {Kind::Found, {kCarry, kPost}}})
    for (const Program& a : one)
      for (const Program& b : one) {
        CHECK(Explorer(kind, {a, b, kEnd}).explore() > 100);
        for (const Program& c : one) CHECK(Explorer(kind, {a, b, c}).explore() > 1000);
      }
}

// The walk finds what it is there for.
TEST(driver_walk_finds_what_is_missing) {
  Next never_parks = [](Kind kind, Driver::ThreadAct act, bool answer) {
    return act == Driver::ThreadAct::Ticket ? Driver::ThreadAct::AskStopped : Driver::next(kind, act, answer);
  };
  CHECK(finds(Kind::Handed, {kRun, kPoke}, never_parks));
  Next sleeps_hushed = [](Kind kind, Driver::ThreadAct act, bool answer) {
    return act == Driver::ThreadAct::Hush ? Driver::ThreadAct::Sleep : Driver::next(kind, act, answer);
  };
  CHECK(finds(Kind::Handed, {kRun, kPoke}, sleeps_hushed));
  // Not asked again: it sleeps in a step beside who has seen it parked.
  Next asks_once = [](Kind kind, Driver::ThreadAct act, bool answer) {
    return act == Driver::ThreadAct::Unpark ? Driver::ThreadAct::Drive : Driver::next(kind, act, answer);
  };
  CHECK(finds(Kind::Found, {kPost, kCarry}, asks_once));
  CHECK(finds(Kind::Handed, {kPoke, without(without(kRun, kCall), kWake)}));  // leaves without a call
  CHECK(finds(Kind::Handed, {without(kPoke, kCall), kRun}));                  // wakes who is about to sleep
  CHECK(finds(Kind::Found, {kPost, without(kCarry, kInterrupt)}));            // waits beside a step
  CHECK(finds(Kind::Handed, {kPoke, without(kEnd, kCall)}));                  // stops who is about to sleep
}

}  // namespace syncengine
