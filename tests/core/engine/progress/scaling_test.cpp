// How the wake-ups of an all-reduce grow with the number of ranks: counted, not timed.
#include <atomic>
#include <chrono>
#include <cstdio>

#include "job.h"

namespace syncengine {

namespace {

using testing::all_reduce_of, testing::run_job;

constexpr int kOperations = 40 / testing::kSlowdown;
constexpr double kWaits = 3;  // of an operation of one chunk: for records or contributions, for results, for readers
constexpr auto kTick = std::chrono::milliseconds(50);  // how often a sleeper looks around, whoever rings

}  // namespace

// A rank that waits names, for each reason to wait, one peer whose step it needs, and is not woken by the others: in
// any random order of the peers the wake-ups of a wait grow like the logarithm of their number. In the worst order each
// peer rings once.
TEST(wake_ups_of_an_all_reduce_grow_at_most_like_the_ranks) {
  for (const bool in_arena : {false, true})
    for (const size_t bytes : {size_t{512}, size_t{4} << 10, size_t{256} << 10})
      for (const int world : {2, 4, 8, 16}) {
        std::atomic<uint64_t> sleeps{0};
        const auto begin = std::chrono::steady_clock::now();
        run_job(world, {.arena_bytes = 64 << 20}, [&](int /*rank*/, Communicator& communicator) {
          std::vector<float> ordinary(bytes / sizeof(float));
          const auto allocated = communicator.allocate(bytes);
          void* const memory = in_arena ? allocated.get() : ordinary.data();
          const uint64_t before = communicator.counters().at("sleeps");
          for (int i = 0; i < kOperations; ++i) communicator.run(all_reduce_of(memory, bytes));
          sleeps += communicator.counters().at("sleeps") - before;
        });
        const double ticks = world * ((std::chrono::steady_clock::now() - begin) / kTick + 1);
        const double each = static_cast<double>(sleeps) / world / kOperations;
        std::printf("  %2d ranks, %6zu bytes in %s memory: %.2f sleeps a rank and operation\n", world, bytes,
                    in_arena ? "shared" : "ordinary", each);
        CHECK(static_cast<double>(sleeps) <= kWaits * (world - 1) * world * kOperations + ticks);
      }
}

}  // namespace syncengine
