// Walks all that can happen to a model's steps, as steps_model.h has them: on one rank with nested tasks, forwards that
// are dropped, and errors at each place; on two ranks, of which both or one raise; and for two wrappers that share a
// parameter. A backward through a synchronized forward averages each gradient once, or raises; all ranks have averages
// of a step or none, unless one raises behind them; nobody waits for ever; and behind any end a forward works.
#include <cstdio>
#include <string>

#include "steps_explorer.h"
#include "steps_wrappers.h"
#include "test.h"

namespace syncengine {

namespace walk {
namespace {

size_t walk_one_rank(Flaw flaw = Flaw::None) {
  size_t states = 0;
  for (bool hooked : {true, false})
    for (Place first : kAnywhere)
      for (Place second : kAnywhere)
        states +=
            Explorer({{first, second, Place::Nowhere}},
                     {.hooked = hooked, .nested = true, .local = true, .drops = true, .again = true, .kept = true},
                     flaw)
                .explore();
  return states;
}

size_t walk_two_ranks(Flaw flaw = Flaw::None) {
  size_t states = 0;
  for (bool hooked : {true, false})
    for (Place a : kAnywhere)
      for (Place b : kAnywhere)
        for (Place then : {Place::Nowhere, Place::InForward, Place::InBackward})
          states += Explorer({{a, then, Place::Nowhere}, {b, Place::Nowhere, Place::Nowhere}},
                             {.hooked = hooked, .ordered = true}, flaw)
                        .explore();
  return states;
}

}  // namespace
}  // namespace walk

TEST(steps_of_one_rank_average_or_raise) {
  const size_t states = walk::walk_one_rank();
  std::printf("  one rank: %zu states\n", states);
  CHECK(states > 1000);
}

TEST(steps_of_two_ranks_have_averages_on_both_or_none) {
  const size_t states = walk::walk_two_ranks();
  std::printf("  two ranks: %zu states\n", states);
  CHECK(states > 10000);
}

TEST(two_wrappers_with_one_parameter_average_their_own_backwards) {
  const size_t states = walk::Wrappers(walk::Flaw::None).explore();
  std::printf("  two wrappers: %zu states\n", states);
  CHECK(states > 100);
}

// The walks find what they are there for.
TEST(steps_walks_find_each_flaw) {
  for (int flaw = 1; flaw <= static_cast<int>(walk::kLastFlaw); ++flaw) {
    const auto planted = static_cast<walk::Flaw>(flaw);
    const bool found = testing::fails([&] { walk::Wrappers(planted).explore(); }) ||
                       testing::fails([&] { walk::walk_two_ranks(planted); }) ||
                       testing::fails([&] { walk::walk_one_rank(planted); });
    if (!found) throw testing::Failure("flaw " + std::to_string(flaw) + " was not found");
  }
}

}  // namespace syncengine
