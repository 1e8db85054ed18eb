// Many threads, communicators and operations at once, with delays where they hurt: nothing hangs, nothing is mixed up.
#include <atomic>
#include <numeric>
#include <random>

#include "job.h"

namespace syncengine {

using testing::all_reduce_of;
using testing::run_job;

namespace {

void pause(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

// Something that an operation keeps alive and that takes its time to go: a rank that stalls where the operation ends.
std::shared_ptr<void> slow_to_let_go(int milliseconds) {
  return {nullptr, [milliseconds](void*) { pause(milliseconds); }};
}

Operation all_reduce_of(std::vector<float>& data) { return testing::all_reduce_of(data.data(), data.size() * 4, DType::Float32); }

void check_all(const std::vector<float>& data, float expected) {
  for (float value : data) CHECK_EQ(value, expected);
}

}  // namespace

// Rank 1 stalls at the end of the first operation, with many opened behind it. Rank 0 needs nothing from it for as long as
// operations are direct and their data are there: it must not overwrite the records that rank 1 has yet to compare.
TEST(records_outlast_a_rank_that_stalls) {
  constexpr size_t kOperations = 4 * shm::kRecords;
  Options options;
  options.algorithm = Algorithm::Direct;
  std::barrier rank_1_has_submitted(2);
  run_job(2, options, [&](int rank, Communicator& communicator) {
    if (rank == 0) rank_1_has_submitted.arrive_and_wait();
    std::vector<float> large(5 * shm::kSlotBytes / 4, 1.0f);
    auto shared = communicator.allocate(kOperations * 400);
    auto* floats = static_cast<float*>(shared.get());
    std::fill_n(floats, kOperations * 100, 1.0f);
    Operation first = all_reduce_of(large);
    if (rank == 1) first.keepalive = slow_to_let_go(200);
    std::vector<std::shared_ptr<Work>> works{communicator.submit(std::move(first))};
    for (size_t i = 0; i < kOperations; ++i)  // another length each, so that records can't be taken for each other
      works.push_back(communicator.submit(all_reduce_of(floats + i * 100, (1 + i % 97) * 4, DType::Float32)));
    if (rank == 1) rank_1_has_submitted.arrive_and_wait();
    for (auto& work : works) communicator.wait(work);
    check_all(large, 2);
    for (size_t i = 0; i < kOperations; ++i) CHECK_EQ(floats[i * 100 + i % 97], 2.0f);
  });
}

}  // namespace syncengine
