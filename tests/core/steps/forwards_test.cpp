// Two forwards of one backward, and the plan that it goes by: every combination of which of them lives, has
// made some of the graph that runs, says a weight, was made for another plan; against rules in words of their own.
#include "steps/forwards.h"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "steps/bucket_plan.h"
#include "test.h"

namespace syncengine {
namespace {

const auto kNames = std::make_shared<const ModelNames>(ModelNames{"Model", {"a", "b", "c"}});

Fact float_of(size_t bytes) { return {.footprint = {bytes, 6}, .dtype = DType::Float32, .type_name = "Float"}; }

std::shared_ptr<const BucketPlan> plan_of(const std::vector<std::vector<size_t>>& buckets) {
  return std::make_shared<const BucketPlan>(buckets, std::vector<Fact>(3, float_of(4)), kNames, false);
}

// Autograd's answers, and the parameters as they are now.
struct Seen {
  const Forward* running[2] = {};  // forwards that have made some of the graph
  bool trained[3] = {true, true, true};
  size_t bytes[3] = {4, 4, 4};

  bool is_in_this_task(const Forward& forward) const { return &forward == running[0] || &forward == running[1]; }
  void add_reached(std::vector<bool>& reachable) const { reachable[2] = true; }
  bool is_trained(size_t index) const { return trained[index]; }
  Footprint footprint(size_t index) const { return {bytes[index], 6}; }
};

bool bit(unsigned bits, unsigned n) { return (bits >> n & 1) != 0; }

TEST(a_backward_comes_from_the_forwards_that_live_and_take_part) {
  for (unsigned bits = 0; bits < 1 << 10; ++bits) {
    // The bits of each: lives, has outputs with hooks, takes part, and says a weight: none, 2 or 3.
    std::vector<std::shared_ptr<Forward>> forwards;
    Forwards book;
    Seen seen;
    std::optional<double> weight[2];
    for (unsigned f : {0u, 1u}) {
      const unsigned of = bits >> (5 * f);
      auto forward = std::make_shared<Forward>(Forward{.weighting = {.divisor = 4}});
      if (bit(of, 3) || bit(of, 4)) weight[f] = bit(of, 3) ? 2 : 3;
      if (weight[f]) forward->weighting = {.divisor = 4, .weight = *weight[f], .given = true};
      forward->reachable = {f == 0, f == 1, false};
      if (bit(of, 1)) forward->outputs.push_back(&seen);
      if (bit(of, 2)) seen.running[f] = forward.get();
      book.expect(forward);
      forwards.push_back(std::move(forward));
    }
    std::vector<unsigned> told;
    bool kept = false;
    for (unsigned f : {0u, 1u}) {
      const unsigned of = bits >> (5 * f);
      if (!bit(of, 0)) forwards[f].reset();
      // The book keeps the last one without a hooked output, since nothing else does.
      kept = !bit(of, 1) && (f == 1 || bit(bits >> 5, 1));
      if (bit(of, 0) || kept) told.push_back(f);
    }
    for (bool looks : {false, true}) {
      std::vector<unsigned> speak = told;
      if (told.size() == 2 && (looks || weight[0] != weight[1])) {
        speak.clear();
        for (unsigned f : told)
          if (bit(bits >> (5 * f), 2)) speak.push_back(f);
        if (speak.empty()) speak = {1};
      }
      bool contradict = speak.size() == 2 && weight[0] && weight[1] && *weight[0] != *weight[1];
      Forward all{.weighting = {.divisor = 4}};
      if (contradict) {
        CHECK_THROWS(book.tell(all, *kNames, looks, seen), ErrorKind::InvalidUsage);
        continue;
      }
      book.tell(all, *kNames, looks, seen);
      std::optional<double> said;
      std::vector<bool> reachable{false, false, true};  // from a loss that is no output
      for (unsigned f : speak) {
        if (weight[f]) said = weight[f];
        reachable[f] = true;
      }
      CHECK_EQ(all.weighting.weight, said.value_or(1));
      CHECK_EQ(all.weighting.given, said.has_value());
      if (looks) CHECK(all.reachable == reachable);
    }
  }
}

TEST(a_backward_goes_by_the_plan_of_the_forward_that_it_comes_from) {
  const auto all = plan_of({{0, 1}, {2}}), frozen = plan_of({{0, 1}}), none = plan_of({});
  for (const auto& current : {all, frozen, none})
    for (bool takes_part : {false, true})
      for (bool trained : {false, true})
        for (size_t bytes : {4, 8}) {
          Forwards book;
          auto forward = std::make_shared<Forward>(Forward{.weighting = {.divisor = 1}, .plan = all});
          book.expect(forward);
          Seen seen{.running = {takes_part ? forward.get() : nullptr}, .bytes = {4, 4, bytes}};
          seen.trained[2] = trained;  // else it is frozen now
          const auto plan = book.plan(current, seen);
          // Only the forward's plan has what is missing, and what still is as it was then.
          bool lacks = current != all && (trained || current == none);
          if (current == all && trained && bytes == 8) lacks = false;
          const bool fits = bytes == 4 || current == frozen || current == none;
          CHECK(plan == (lacks && takes_part && fits ? all : current));
        }
}

TEST(buckets_are_made_of_facts_or_refused_by_name) {
  const std::vector<Fact> facts{float_of(4), float_of(8), {.footprint = {4, 3}, .type_name = "Int"}};
  auto make = [&](std::vector<std::vector<size_t>> buckets) { return BucketPlan(buckets, facts, kNames, false); };
  const BucketPlan plan = make({{1, 0}});
  CHECK_EQ(plan.buckets()[0]->describe(), "bucket 0 of Model (b, a)");
  CHECK(plan.covers(0) && plan.position_of(0) == 1 && !plan.covers(2));
  CHECK(plan.fits(1, {8, 6}) && !plan.fits(1, {4, 6}) && !plan.fits(1, {8, 7}));
  CHECK(make({{0, 1}}).buckets()[0]->hash != plan.buckets()[0]->hash);
  CHECK(testing::contains(CHECK_THROWS(make({{2}}), ErrorKind::InvalidUsage), "c has dtype Int"));
  for (const auto& wrong : std::vector<std::vector<std::vector<size_t>>>{{{0, 0}}, {{3}}, {{}}})
    CHECK_THROWS(make(wrong), ErrorKind::InvalidUsage);
}

TEST(buckets_go_in_their_order_and_the_vote_behind_all) {
  const auto plan = plan_of({{0}, {1}, {2}});
  Filling filling(plan, /*votes=*/true);
  auto bring = [&](size_t parameter) {
    const auto [bucket, first, full] = filling.count(parameter);
    CHECK(bucket == parameter && first && full);
    return filling.filled(bucket, /*skipped=*/parameter == 1);
  };
  CHECK(!bring(2));  // the vote
  CHECK(!filling.next_in_order());
  CHECK(bring(1) && filling.is_skipped(1));
  CHECK(!filling.next_in_order());
  CHECK(bring(0) && filling.is_ready(0) && filling.all());
  for (size_t bucket : {0, 1, 2}) CHECK_EQ(*filling.next_in_order(), bucket);
  CHECK(!filling.next_in_order());
  filling.went(0);
  CHECK(filling.has_gone(0) && !filling.is_ready(0));
  CHECK_EQ(*filling.vote(), 2u);
  CHECK(!Filling(plan, false).vote());
}

}  // namespace
}  // namespace syncengine
