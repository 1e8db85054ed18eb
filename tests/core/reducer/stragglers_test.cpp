#include "reducer/backward/stragglers.h"

#include <cmath>
#include <random>
#include <vector>

#include "test.h"

namespace syncengine {
namespace {

constexpr int64_t kMs = 1'000'000;

TEST(stamps_keep_times_to_a_thousandth) {
  std::mt19937_64 random(7);
  for (int i = 0; i < 1000; ++i) {
    PhaseClock::Own own;
    for (auto& time : own) time = static_cast<int64_t>(random() >> (22 + random() % 40));  // up to an hour
    const auto back = unpack_stamp(pack_stamp(own));
    for (size_t phase = 0; phase < own.size(); ++phase)
      CHECK(std::abs(back[phase] - own[phase]) <= std::max<int64_t>(1000, own[phase] / 1000));
  }
  CHECK_EQ(pack_stamp({}), 0u);
  CHECK_EQ(pack_stamp({-5 * kMs, 0, 0, 0}), 0u);  // more waited than passed, by the granularity of clocks
  CHECK_EQ(unpack_stamp(pack_stamp({INT64_MAX, 0, 0, 0}))[0], (int64_t{0x7ff} << 31) * 1000);  // the longest
}

TEST(lateness_is_that_behind_the_fastest_rank) {
  Stragglers stragglers;
  for (int k = 0; k < 30; ++k) {
    const int64_t late = k < 20 ? 40 * kMs : 0;  // rank 1, in two thirds of the steps
    stragglers.add({pack_stamp({2 * kMs, 5 * kMs, 9 * kMs, kMs}), pack_stamp({2 * kMs + late, 5 * kMs, 9 * kMs, kMs}),
                    pack_stamp({3 * kMs, 5 * kMs, 9 * kMs, kMs})});
  }
  const auto ranks = stragglers.ranks(100 * kMs);
  CHECK_EQ(stragglers.steps(), 30u);
  CHECK_EQ(ranks.size(), 3u);
  CHECK_EQ(ranks[0].late, 0);
  CHECK(std::abs(ranks[1].late - 40 * kMs) < kMs / 10);
  CHECK(std::abs(ranks[1].by_phase[PhaseClock::Input] - 40 * kMs) < kMs / 10);
  CHECK_EQ(ranks[1].by_phase[PhaseClock::Forward], 0);
  CHECK_EQ(ranks[1].often[0], 15u);
  CHECK_EQ(ranks[1].often[1], 5u);
  CHECK(std::abs(ranks[2].late - kMs) < kMs / 10);
  CHECK_EQ(ranks[2].often[0] + ranks[2].often[1], 0u);  // by a hundredth of a step
}

TEST(ranks_without_a_batch_are_late_for_nobody) {
  Stragglers stragglers;
  CHECK(stragglers.ranks(kMs).empty());
  stragglers.add({1, 0});
  stragglers.add({0, 0});
  CHECK_EQ(stragglers.steps(), 0u);
  for (int k = 0; k < 10; ++k)
    stragglers.add({0, pack_stamp({kMs, 0, 0, 0}), pack_stamp({kMs, 0, 8 * kMs, 0}), pack_stamp({2 * kMs, 0, 0, 0})});
  const auto ranks = stragglers.ranks(20 * kMs);
  CHECK_EQ(stragglers.steps(), 10u);
  CHECK_EQ(ranks[0].late, 0);
  CHECK_EQ(ranks[0].often[0] + ranks[0].often[1], 0u);
  CHECK(std::abs(ranks[2].late - 8 * kMs) < kMs / 10);
  CHECK(std::abs(ranks[2].by_phase[PhaseClock::Backward] - 8 * kMs) < kMs / 10);
  CHECK_EQ(ranks[2].often[0] + ranks[2].often[1], 10u);
  CHECK(std::abs(ranks[3].late - kMs) < kMs / 10);
}

TEST(the_last_hundred_steps_are_compared) {
  Stragglers stragglers;
  for (int k = 0; k < 150; ++k)
    stragglers.add({pack_stamp({kMs, 0, 0, 0}), pack_stamp({(k < 99 ? 9 : 2) * kMs, 0, 0, 0})});
  CHECK_EQ(stragglers.steps(), Stragglers::kWindow);
  CHECK(std::abs(stragglers.ranks(kMs)[1].late - kMs) < kMs / 10);  // of the last 51
}

}  // namespace
}  // namespace syncengine
