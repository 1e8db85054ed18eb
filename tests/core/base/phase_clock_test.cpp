#include "base/phase_clock.h"

#include <chrono>
#include <numeric>
#include <thread>

#include "test.h"

namespace syncengine {
namespace {

void pass(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }
int64_t sum(const PhaseClock::Own& own) { return std::accumulate(own.begin(), own.end(), int64_t{0}); }

TEST(time_is_charged_to_the_phase_it_was_spent_in) {
  PhaseClock clock;
  const int64_t begin = clock.enter(PhaseClock::Forward);
  pass(2);
  const int64_t middle = clock.enter(PhaseClock::Backward);
  const int64_t end = clock.enter(PhaseClock::Wait);
  pass(2);
  const int64_t after = clock.enter(PhaseClock::Input);
  CHECK(after > end);
  const auto own = clock.take();
  CHECK_EQ(own[PhaseClock::Forward], middle - begin);
  CHECK_EQ(own[PhaseClock::Backward], end - middle);
  CHECK_EQ(sum(own), end - begin);  // not the wait for averages
  CHECK_EQ(sum(clock.take()), 0);
}

TEST(what_a_thread_has_waited_is_not_its_own) {
  PhaseClock clock;
  const int64_t begin = clock.enter(PhaseClock::Forward);
  waited_here() += 12345;
  const int64_t end = clock.enter(PhaseClock::Backward);
  CHECK_EQ(clock.take()[PhaseClock::Forward], end - begin - 12345);
  std::thread([&] {
    waited_here() += 777;  // on another one, since whenever
    clock.enter(PhaseClock::Wait);
  }).join();
  CHECK(clock.take()[PhaseClock::Backward] >= 0);
}

TEST(a_local_backward_ends_with_its_last_gradient) {
  PhaseClock clock;
  const int64_t begin = clock.enter(PhaseClock::Forward);
  clock.local_gradient();
  pass(1);
  clock.local_gradient();
  pass(5);
  waited_here() += 3'000'000;  // in between, as in a collective of the program's
  const int64_t end = clock.enter(PhaseClock::Forward);
  const auto own = clock.take();
  CHECK(own[PhaseClock::Backward] >= 1'000'000);
  CHECK(own[PhaseClock::Input] >= 2'000'000);
  CHECK_EQ(sum(own), end - begin - 3'000'000);
}

TEST(an_optimizer_may_step_within_backward) {
  PhaseClock clock;
  clock.enter(PhaseClock::Backward);
  clock.begin_optimizer();
  pass(1);
  clock.end_optimizer();
  pass(1);
  clock.enter(PhaseClock::Wait);
  const auto own = clock.take();
  CHECK(own[PhaseClock::Optimizer] >= 1'000'000);
  CHECK(own[PhaseClock::Backward] >= 1'000'000);
  CHECK_EQ(own[PhaseClock::Input], 0);
}

}  // namespace
}  // namespace syncengine
