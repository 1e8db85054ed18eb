// Every combination of what may be known where a gradient comes, against a table of rules, the first that fits.
#include "steps/attribution.h"

#include <optional>
#include <string>
#include <vector>

#include "test.h"

namespace syncengine {

namespace {

using Maybe = std::optional<bool>;
constexpr Maybe kAny = std::nullopt;

struct Rule {
  const char* what;
  Phase phase;
  Maybe claimed, claimed_elsewhere, in_our_task, given_up, outputs_hooked, awaited_elsewhere, made_by_forward;
  Attribution verdict;
};

// claimed, claimed elsewhere; in our task, given up, outputs hooked, awaited elsewhere, made by a forward
const std::vector<Rule> kRules = {
    {"under no_sync", Phase::Local, kAny, kAny, kAny, kAny, kAny, kAny, kAny, Attribution::Local},
    {"from our output", Phase::Armed, true, kAny, kAny, kAny, kAny, kAny, kAny, Attribution::First},
    {"another wrapper's", Phase::Armed, false, true, kAny, kAny, kAny, kAny, kAny, Attribution::Foreign},
    {"past every output", Phase::Armed, false, false, kAny, kAny, kAny, kAny, kAny, Attribution::First},
    {"the next one", Phase::Syncing, kAny, kAny, kAny, kAny, kAny, kAny, kAny, Attribution::Mine},
    {"while averages come", Phase::Finalizing, kAny, kAny, kAny, kAny, kAny, kAny, kAny, Attribution::TooLate},
    {"lost on another thread", Phase::Consumed, kAny, kAny, true, true, kAny, kAny, kAny, Attribution::GivenUp},
    {"an outer task's", Phase::Consumed, kAny, kAny, true, false, kAny, kAny, kAny, Attribution::TooLate},
    {"past our outputs", Phase::Consumed, kAny, kAny, false, kAny, true, kAny, kAny, Attribution::Foreign},
    {"a new wrapper's", Phase::Consumed, kAny, kAny, false, kAny, false, true, kAny, Attribution::Foreign},
    {"of another graph", Phase::Consumed, kAny, kAny, false, kAny, false, false, false, Attribution::Foreign},
    {"a second time", Phase::Consumed, kAny, kAny, false, kAny, false, false, true, Attribution::Consumed},
};

bool fits(Maybe wanted, bool is) { return !wanted || *wanted == is; }

const Rule& rule_for(const Circumstances& c) {
  for (const Rule& rule : kRules) {
    if (rule.phase == c.phase && fits(rule.claimed, c.claimed) && fits(rule.claimed_elsewhere, c.claimed_elsewhere) &&
        fits(rule.in_our_task, c.in_our_task) && fits(rule.given_up, c.given_up) &&
        fits(rule.outputs_hooked, c.outputs_hooked) && fits(rule.awaited_elsewhere, c.awaited_elsewhere) &&
        fits(rule.made_by_forward, c.made_by_forward)) {
      return rule;
    }
  }
  throw testing::Failure("no rule");
}

TEST(whose_a_gradient_is) {
  std::vector<size_t> used(kRules.size());
  for (int phase = 0; phase < 5; ++phase) {
    for (unsigned bits = 0; bits < 128; ++bits) {
      auto bit = [bits](unsigned n) { return (bits >> n & 1) != 0; };
      const Circumstances here{static_cast<Phase>(phase), bit(0), bit(1), bit(2), bit(3), bit(4), bit(5), bit(6)};
      const Rule& rule = rule_for(here);
      ++used[&rule - kRules.data()];
      if (attribute(here) != rule.verdict) {
        throw testing::Failure(std::string(rule.what) + ", phase " + std::to_string(phase) + ", bits " +
                               std::to_string(bits));
      }
    }
  }
  for (size_t i = 0; i < used.size(); ++i) CHECK(used[i] > 0);
}

}  // namespace

}  // namespace syncengine
