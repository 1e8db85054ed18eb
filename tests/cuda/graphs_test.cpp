// A step of an odd number of collectives, captured once and replayed between eager calls, with ranks that are late.
#include "ranks.h"

namespace syncengine {

TEST(gpu_graphs_replay_between_eager_calls) {
  constexpr int kWorld = 3, kRounds = 1000 / testing::kSlowdown;
  constexpr size_t kBytes[] = {1000, 300'000, 4000};  // one kernel; staged; direct
  Options options;
  options.timeout = seconds(60);
  testing::run_job(kWorld, options, [&](int rank, Communicator& communicator) {
    testing::GpuRank gpu(communicator);
    std::vector<std::byte*> memories;
    for (size_t i = 0; i < 3; ++i) memories.push_back(gpu.take(kBytes[i], i == 2));
    const auto step = [&] {
      for (size_t i = 0; i < 3; ++i) gpu.run(testing::all_reduce_of(memories[i], kBytes[i], DType::Int32));
    };
    for (size_t i = 0; i < 3; ++i) {
      const std::vector<int32_t> start(kBytes[i] / 4, static_cast<int32_t>(i) + rank);
      const auto* bytes = reinterpret_cast<const std::byte*>(start.data());
      gpu.put(memories[i], {bytes, bytes + kBytes[i]});
    }
    step();
    gpu.wait();
    testing::Replay replay(gpu, step);
    int steps = 1;
    for (int round = 0; round < kRounds; ++round) {
      if (round % 97 == 31 * rank) std::this_thread::sleep_for(std::chrono::milliseconds(3));
      if (round % 10 == 3) step(), ++steps;
      replay.launch(), ++steps;
      if (round % 50 == 49) gpu.wait();
    }
    for (size_t i = 0; i < 3; ++i) {
      auto wanted = static_cast<uint32_t>(kWorld * i + kWorld * (kWorld - 1) / 2);
      for (int s = 1; s < steps; ++s) wanted *= kWorld;
      const auto result = gpu.get(memories[i], kBytes[i]);
      for (size_t at = 0; at < result.size(); at += 4) CHECK(std::memcmp(&result[at], &wanted, 4) == 0);
    }
  });
}

}  // namespace syncengine
