// Verdicts of the Lifecycle that need facts which the walks of lifecycle_test.cpp keep as they are: a model without
// buckets, peers that can't hear of a refusal, a static graph, a backward that has `inputs`; against tables.
#include <array>
#include <cstddef>
#include <iterator>
#include <set>

#include "steps/lifecycle.h"
#include "test.h"

namespace syncengine {

namespace {

struct Known {
  bool failed = false, refuses = false, frozen = false, plan = true;          // about peers and buckets
  bool observed = false, collected = false, ours = false, outermost = false;  // at the end of a task
  bool accumulated = false, whole = false;                                    // at an output

  bool has_failed() const { return failed; }
  bool can_refuse() const { return refuses; }
  bool all_frozen() const { return frozen; }
  bool has_plan() const { return plan; }
  bool observes() const { return observed; }
  bool collected_all() const { return collected; }
  bool in_our_task() const { return ours; }
  bool is_outermost() const { return outermost; }
  bool accumulates() const { return accumulated; }
  bool whole_graph() const { return whole; }
  bool in_task() const { return true; }
  bool runs_forwards_nodes() const { return true; }
  bool runs_forwards_graph() const { return true; }
  bool claimed_elsewhere(size_t /*parameter*/) const { return false; }
  bool awaited_elsewhere(size_t /*parameter*/) const { return false; }
};

constexpr Phase kPhases[] = {Phase::Local, Phase::Armed, Phase::Syncing, Phase::Finalizing, Phase::Consumed};

Lifecycle life_in(Phase phase, bool outputs_hooked = true) {
  Lifecycle life;
  if (phase != Phase::Local) life.forward_ended(outputs_hooked);
  if (phase == Phase::Syncing || phase == Phase::Finalizing) life.backward_begins();
  if (phase == Phase::Finalizing) life.shadow_waits();
  if (phase == Phase::Consumed) life.backward_ended();
  CHECK(life.phase() == phase);
  return life;
}

TEST(peers_hear_of_an_error_if_they_wait) {
  using Tell = Lifecycle::Tell;
  for (Phase phase : kPhases) {
    const Lifecycle life = life_in(phase);
    for (bool frozen : {false, true}) {
      CHECK(life.tell(Known{.refuses = true, .frozen = frozen}) == Tell::Refuse);
      // They wait for what no refusal ends, unless no rank has buckets.
      CHECK(life.tell(Known{.frozen = frozen}) == (frozen ? Tell::Nobody : Tell::Abort));
      for (bool refuses : {false, true})
        CHECK(life.tell(Known{.failed = true, .refuses = refuses, .frozen = frozen}) == Tell::Nobody);
    }
  }
}

TEST(an_error_in_forward_counts_if_peers_expect_a_backward) {
  using ForwardError = Lifecycle::ForwardError;
  for (Phase phase : kPhases) {
    const Lifecycle life = life_in(phase);
    const bool recomputes = phase == Phase::Syncing || phase == Phase::Finalizing;
    for (bool frozen : {false, true}) {
      CHECK(life.forward_raised(Known{.frozen = frozen, .plan = false}) == ForwardError::Untold);
      const ForwardError otherwise = frozen ? ForwardError::Expected : ForwardError::GivesUp;
      CHECK(life.forward_raised(Known{.frozen = frozen}) == (recomputes ? ForwardError::Untold : otherwise));
    }
  }
}

// The gradient comes on another thread than the error. Peers may not have heard of that by a refusal.
TEST(a_gradient_behind_an_error_is_given_up_and_not_too_late) {
  for (bool lost : {false, true}) {
    Lifecycle life = life_in(Phase::Syncing);
    lost ? life.step_lost() : life.delivered(1);
    CHECK(life.gradient(0, Known{.ours = true}) == (lost ? Attribution::GivenUp : Attribution::TooLate));
  }
}

TEST(an_error_begins_the_step_if_there_are_buckets_and_peers) {
  using Loss = Lifecycle::Loss;
  for (auto where : {Lifecycle::Where::Forward, Lifecycle::Where::Backward}) {
    const Lifecycle life = life_in(Phase::Armed);
    CHECK(life.raised(where, Known{}) == Loss::BeginsStep);
    CHECK(life.raised(where, Known{.plan = false}) == Loss::Here);
    CHECK(life.raised(where, Known{.failed = true}) == Loss::Here);
    CHECK(life_in(Phase::Syncing).raised(where, Known{}) == Loss::Here);
  }
}

// The first backward of a static graph ends with its last task, though a parameter has brought nothing.
TEST(a_backward_ends_with_its_gradients_or_as_it_was_observed) {
  // Facts with which it ends although gradients are missing: observed, another task of ours, outputs hooked, outermost.
  const std::set<std::array<bool, 4>> ends = {
      {true, false, true, true}, {true, false, true, false}, {true, false, false, true}};
  for (unsigned bits = 0; bits < 1 << 5; ++bits) {
    auto bit = [bits](unsigned n) { return (bits >> n & 1) != 0; };
    const bool collected = bit(4), observed = bit(0), ours = bit(1), hooked = bit(2), outermost = bit(3);
    Lifecycle life = life_in(Phase::Syncing, hooked);
    const auto end =
        life.task_ended(Known{.observed = observed, .collected = collected, .ours = ours, .outermost = outermost});
    const bool finalizes = collected || ends.contains({observed, ours, hooked, outermost});
    CHECK(end == (finalizes ? Lifecycle::End::Finalize : Lifecycle::End::Wait));
    CHECK(life.phase() == (finalizes ? Phase::Finalizing : Phase::Syncing));
  }
}

TEST(a_backward_claims_the_model_if_it_runs_through_the_whole_graph) {
  using Output = Lifecycle::Output;
  constexpr Output kWhole[] = {Output::Ignore, Output::Claims, Output::Ignore, Output::Ignore, Output::Spent};
  for (size_t i = 0; i < std::size(kPhases); ++i)
    for (bool accumulates : {false, true})
      for (bool whole : {false, true}) {
        const Known known{.accumulated = accumulates, .whole = whole};
        Lifecycle own = life_in(kPhases[i]), averaged = life_in(kPhases[i]);
        CHECK(own.output(/*own=*/true, known) == (accumulates ? Output::Own : Output::Ignore));
        CHECK(averaged.output(/*own=*/false, known) == (whole ? kWhole[i] : Output::Ignore));
        CHECK(!own.claimed());
        CHECK_EQ(averaged.claimed(), whole && kPhases[i] == Phase::Armed);
      }
}

}  // namespace

}  // namespace syncengine
