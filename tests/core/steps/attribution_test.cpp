// Every combination of what may be known where a gradient comes, against a table of rules, the first that fits; and
// what is asked for that, since some facts are dear.
#include <array>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "steps/lifecycle.h"
#include "test.h"

namespace syncengine {

namespace {

using Maybe = std::optional<bool>;
constexpr Maybe kAny = std::nullopt;

struct Rule {
  const char* what;
  Phase phase;
  std::array<Maybe, 7> facts;
  Attribution verdict;
};

// claimed, claimed elsewhere; in our task, given up, outputs hooked, awaited elsewhere, made by a forward
const std::vector<Rule> kRules = {
    {"under no_sync", Phase::Local, {kAny, kAny, kAny, kAny, kAny, kAny, kAny}, Attribution::Local},
    {"from our output", Phase::Armed, {true, kAny, kAny, kAny, kAny, kAny, kAny}, Attribution::First},
    {"another wrapper's", Phase::Armed, {false, true, kAny, kAny, kAny, kAny, kAny}, Attribution::Foreign},
    {"past every output", Phase::Armed, {false, false, kAny, kAny, kAny, kAny, kAny}, Attribution::First},
    {"the next one", Phase::Syncing, {kAny, kAny, kAny, kAny, kAny, kAny, kAny}, Attribution::Mine},
    {"while averages come", Phase::Finalizing, {kAny, kAny, kAny, kAny, kAny, kAny, kAny}, Attribution::TooLate},
    {"lost on another thread", Phase::Consumed, {kAny, kAny, true, true, kAny, kAny, kAny}, Attribution::GivenUp},
    {"an outer task's", Phase::Consumed, {kAny, kAny, true, false, kAny, kAny, kAny}, Attribution::TooLate},
    {"past our outputs", Phase::Consumed, {kAny, kAny, false, kAny, true, kAny, kAny}, Attribution::Foreign},
    {"a new wrapper's", Phase::Consumed, {kAny, kAny, false, kAny, false, true, kAny}, Attribution::Foreign},
    {"of another graph", Phase::Consumed, {kAny, kAny, false, kAny, false, false, false}, Attribution::Foreign},
    {"a second time", Phase::Consumed, {kAny, kAny, false, kAny, false, false, true}, Attribution::Consumed},
};

// The bits of one combination, which counts what is asked of it.
struct Bits {
  bool operator()(unsigned n) const { return (bits >> n & 1) != 0; }
  bool ask(unsigned n) {
    asked |= 1u << n;
    return (*this)(n);
  }
  bool claimed_elsewhere(size_t /*parameter*/) { return ask(1); }
  bool in_our_task() { return ask(2); }
  bool awaited_elsewhere(size_t /*parameter*/) { return ask(5); }
  bool runs_forwards_graph() { return ask(6); }

  unsigned bits;
  unsigned asked = 0;
};

const Rule& rule_for(Phase phase, const Bits& bit) {
  for (const Rule& rule : kRules) {
    bool fits = rule.phase == phase;
    for (unsigned fact = 0; fact < 7; ++fact) fits &= rule.facts[fact].value_or(bit(fact)) == bit(fact);
    if (fits) return rule;
  }
  throw testing::Failure("no rule");
}

TEST(whose_a_gradient_is) {
  std::vector<size_t> used(kRules.size());
  for (int phase = 0; phase < 5; ++phase)
    for (unsigned bits = 0; bits < 128; ++bits) {
      Bits here{bits};
      const Rule& rule = rule_for(static_cast<Phase>(phase), here);
      ++used[&rule - kRules.data()];
      const Standing standing{static_cast<Phase>(phase), here(0), here(3), here(4)};
      const bool right = attribute(standing, 0, here) == rule.verdict;
      bool lazy = true;  // a rule that names a fact needs it; one that comes later may be decided by it
      for (unsigned fact = 0; fact < 7; ++fact) lazy &= (here.asked >> fact & 1) == 0 || rule.facts[fact].has_value();
      if (!right || !lazy)
        throw testing::Failure(std::string(rule.what) + ", phase " + std::to_string(phase) + ", bits " +
                               std::to_string(bits) + (right ? ": asks too much" : ""));
    }
  for (size_t i = 0; i < used.size(); ++i) CHECK(used[i] > 0);
}

}  // namespace

}  // namespace syncengine
