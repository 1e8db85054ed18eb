// Ranks with devices on several virtual hosts: through pinned memory and the CPU's engine, stream-ordered as on one
// host.
#include "hosts_job.h"
#include "ranks.h"

namespace syncengine {

namespace {

using testing::GpuRank;

Options patient() {
  Options options;
  options.timeout = seconds(60);
  return options;
}

}  // namespace

TEST(gpu_collectives_between_hosts) {
  for (const char* hosts : {"ab", "aab", "abcab"})
    testing::run_hosts(hosts, patient(), [&](int rank, Communicator& communicator) {
      GpuRank gpu(communicator);
      int round = 0;
      for (auto collective : {Collective::AllReduce, Collective::Broadcast, Collective::ReduceScatter,
                              Collective::AllGather, Collective::Barrier})
        for (Numerics numerics : {Numerics::RankOrder, Numerics::Ring})
          for (DType dtype : {DType::Float32, DType::BFloat16})
            for (Path path : {Path::Staged, Path::Direct})  // torch's memory, and syncengine.empty's
              for (size_t count : {0, 1, 37, 40'000})
                testing::check_case(gpu, {collective, path, false, numerics, dtype, count}, rank, communicator.size(),
                                    ++round);
      CHECK(gpu.group().counters().at("relayed_bytes") > 0);
    });
}

// More than all slots hold, queued without a wait; each rank's host is late in turn.
TEST(gpu_large_tensors_between_hosts) {
  constexpr int kWorld = 3, kCalls = 3;
  constexpr size_t kCount = 9'000'003;
  for (Numerics numerics : {Numerics::RankOrder, Numerics::Ring})
    testing::run_hosts("aab", patient(), [&](int rank, Communicator& communicator) {
      GpuRank gpu(communicator);
      std::byte* memory = gpu.take(4 * kCount, false);
      auto at = [](size_t i, int whose) { return static_cast<int32_t>((i + 1) * 2654435761u * (whose + 3)); };
      std::vector<std::byte> words(4 * kCount);
      for (size_t i = 0; i < kCount; ++i) {
        const int32_t word = at(i, rank);
        std::memcpy(&words[4 * i], &word, 4);
      }
      gpu.put(memory, words);
      for (int call = 0; call < kCalls; ++call) {
        if (call == rank) std::this_thread::sleep_for(std::chrono::milliseconds(20));
        auto operation = testing::all_reduce_of(memory, words.size(), DType::Int32);
        operation.numerics = numerics;
        gpu.run(operation);
      }
      words = gpu.get(memory, words.size());
      for (size_t i = 0; i < kCount; ++i) {
        uint32_t sum = 0;
        for (int whose = 0; whose < kWorld; ++whose) sum += static_cast<uint32_t>(at(i, whose));
        for (int call = 1; call < kCalls; ++call) sum *= kWorld;
        CHECK(std::memcmp(&words[4 * i], &sum, 4) == 0);
      }
    });
}

TEST(gpu_graphs_between_hosts) {
  constexpr int kRounds = 200 / testing::kSlowdown;
  constexpr size_t kCount = 5000;
  testing::run_hosts("aab", patient(), [&](int rank, Communicator& communicator) {
    GpuRank gpu(communicator);
    std::byte* memory = gpu.take(4 * kCount, false);
    const auto step = [&] { gpu.run(testing::all_reduce_of(memory, 4 * kCount, DType::Int32)); };
    const std::vector<int32_t> start(kCount, rank + 1);
    const auto* bytes = reinterpret_cast<const std::byte*>(start.data());
    gpu.put(memory, {bytes, bytes + 4 * kCount});
    step();
    gpu.wait();
    testing::Replay replay(gpu, step);
    uint32_t wanted = 6;
    for (int round = 0; round < kRounds; ++round) {
      if (round % 17 == 5 * rank) std::this_thread::sleep_for(std::chrono::milliseconds(3));
      if (round % 10 == 3) step(), wanted *= 3;
      replay.launch(), wanted *= 3;
    }
    const auto result = gpu.get(memory, 4 * kCount);
    for (size_t at = 0; at < result.size(); at += 4) CHECK(std::memcmp(&result[at], &wanted, 4) == 0);
  });
}

TEST(gpu_ranks_that_call_something_else_on_another_host) {
  testing::run_hosts("ab", patient(), [](int rank, Communicator& communicator) {
    GpuRank gpu(communicator);
    const size_t bytes = rank == 0 ? 400 : 800;
    std::byte* memory = gpu.take(bytes, false);
    gpu.put(memory, testing::floats(bytes / 4, 1));
    gpu.run(testing::all_reduce_of(memory, bytes, DType::Float32));
    const auto result = gpu.get(memory, bytes);
    CHECK(result == std::vector<std::byte>(bytes, std::byte{0xff}));
    const std::string text =
        CHECK_THROWS(gpu.run(testing::all_reduce_of(memory, bytes, DType::Float32)), ErrorKind::Mismatch);
    CHECK(testing::contains(text, "elements) on CUDA tensors where rank"));
    CHECK(testing::contains(text, "elements): all ranks must make the same calls"));
  });
}

TEST(gpu_rank_that_leaves_its_host) {
  testing::run_hosts("ab", patient(), [](int rank, Communicator& communicator) {
    GpuRank gpu(communicator);
    if (rank == 1) return;
    std::byte* memory = gpu.take(4000, false);
    gpu.put(memory, testing::floats(1000, 1));
    gpu.run(testing::all_reduce_of(memory, 4000, DType::Float32));
    CHECK(gpu.get(memory, 4000) == std::vector<std::byte>(4000, std::byte{0xff}));
    const std::string text =
        CHECK_THROWS(gpu.run(testing::all_reduce_of(memory, 4000, DType::Float32)), ErrorKind::PeerLost);
    CHECK(testing::contains(text, "rank 1 has left"));
  });
}

}  // namespace syncengine
