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

TEST(the_last_hundred_steps_are_kept_in_which_two_ranks_have_times) {
  Stragglers stragglers;
  stragglers.add({1, 0});
  stragglers.add({0, 0});
  CHECK(stragglers.own().empty());
  for (int k = 0; k < 150; ++k) stragglers.add({0, pack_stamp({kMs, 0, 0, 0}), pack_stamp({k * kMs, 0, 0, kMs})});
  const auto own = stragglers.own();
  CHECK_EQ(own.size(), Stragglers::kWindow);
  CHECK_EQ(own[0].size(), 3u);
  CHECK(own[0][0] == PhaseClock::Own{});
  CHECK(std::abs(own[0][2][PhaseClock::Input] - 50 * kMs) < kMs / 10);  // the first 50 have gone
  CHECK(std::abs(own[0][2][PhaseClock::Optimizer] - kMs) < kMs / 10);
}

}  // namespace
}  // namespace syncengine
