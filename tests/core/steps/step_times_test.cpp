#include "steps/step_times.h"

#include <algorithm>
#include <cmath>
#include <random>

#include "test.h"

namespace syncengine {
namespace {

constexpr int64_t kMs = 1'000'000;

// As syncengine/parallel/summary.py reads them.
PhaseClock::Own unpack_stamp(uint64_t stamp) {
  PhaseClock::Own own{};
  for (size_t phase = 0; phase < own.size(); ++phase) {
    const uint64_t bits = stamp >> 16 * phase & 0xffff;
    own[phase] = static_cast<int64_t>((bits & 0x7ff) << (bits >> 11)) * 1000;
  }
  return own;
}

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
  StepTimes times;
  times.compare({1, 0});
  times.compare({0, 0});
  CHECK(times.summary().stamps.empty());
  for (int k = 0; k < 150; ++k) times.compare({0, pack_stamp({kMs, 0, 0, 0}), pack_stamp({k * kMs, 0, 0, kMs})});
  const auto stamps = times.summary().stamps;
  CHECK_EQ(stamps.size(), StepTimes::kCompared);
  CHECK_EQ(stamps[0].size(), 3u);
  const PhaseClock::Own own = unpack_stamp(stamps[0][2]);
  CHECK(std::abs(own[PhaseClock::Input] - 50 * kMs) < kMs / 10);  // the first 50 have gone
  CHECK(std::abs(own[PhaseClock::Optimizer] - kMs) < kMs / 10);
}

TEST(the_times_of_the_last_thousand_steps_are_kept) {
  StepTimes times;
  CHECK_EQ(times.end({.end = 1}, 5), 0);
  for (int64_t k = 1; k < 1500; ++k) CHECK_EQ(times.end({.end = k + 1}, 5), k);
  times.interrupt();
  CHECK_EQ(times.end({.end = 2000}, 5), 0);  // a step that failed lies between
  const StepTimes::Summary summary = times.summary();
  CHECK_EQ(summary.steps, 1501u);
  CHECK_EQ(summary.bytes, 5u * 1501);
  CHECK_EQ(summary.last.size(), StepTimes::kKept);
  const auto [first, last] = std::minmax_element(summary.last.begin(), summary.last.end(),
                                                 [](const auto& a, const auto& b) { return a.end < b.end; });
  CHECK_EQ(first->end, 1501 - static_cast<int64_t>(StepTimes::kKept) + 1);
  CHECK_EQ(last->end, 2000);
}

}  // namespace
}  // namespace syncengine
