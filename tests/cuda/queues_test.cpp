// Many collectives on a device, and large ones: of ranks that are threads, on one host and on virtual ones. All kinds
// of collectives are in test_cuda_conformance.py.
#include <random>

#include "hosts_job.h"
#include "ranks.h"

namespace syncengine {

namespace {

using testing::GpuRank;
using testing::run_job;

const Options kPatient{.timeout = seconds(60)};

// More than staging, or all slots between hosts, have room for, on few blocks and on many. The calls are queued without
// a wait; each rank's host is late in turn.
void check_large(int rank, Communicator& communicator, bool direct, Numerics numerics, int calls) {
  constexpr size_t kCount = 11'000'003;
  const int world = communicator.size();
  GpuRank gpu(communicator);
  std::byte* memory = gpu.take(4 * kCount, direct);
  auto at = [](size_t i, int whose) { return static_cast<int32_t>((i + 1) * 2654435761u * (whose + 3)); };
  std::vector<std::byte> words(4 * kCount);
  for (size_t i = 0; i < kCount; ++i) {
    const int32_t word = at(i, rank);
    std::memcpy(&words[4 * i], &word, 4);
  }
  gpu.put(memory, words);
  for (int call = 0; call < calls; ++call) {
    if (call == rank) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    auto operation = testing::all_reduce_of(memory, words.size(), DType::Int32);
    operation.numerics = numerics;
    gpu.run(operation);
  }
  words = gpu.get(memory, words.size());
  for (size_t i = 0; i < kCount; ++i) {
    uint32_t sum = 0;
    for (int whose = 0; whose < world; ++whose) sum += static_cast<uint32_t>(at(i, whose));
    for (int call = 1; call < calls; ++call) sum *= world;
    CHECK(std::memcmp(&words[4 * i], &sum, 4) == 0);
  }
}

}  // namespace

TEST(gpu_all_reduce_in_many_chunks) {
  for (bool direct : {false, true})
    run_job(3, kPatient, [&](int rank, Communicator& communicator) {
      check_large(rank, communicator, direct, Numerics::RankOrder, 1);
    });
}

TEST(gpu_large_tensors_between_hosts) {
  for (Numerics numerics : {Numerics::RankOrder, Numerics::Ring})
    testing::run_hosts("aab", kPatient, [&](int rank, Communicator& communicator) {
      check_large(rank, communicator, false, numerics, 3);
    });
}

// Queued all at once, without a wait between them; each rank's host is late in turn.
TEST(gpu_collectives_queue_up) {
  constexpr int kWorld = 4, kCalls = 40;
  run_job(kWorld, kPatient, [&](int rank, Communicator& communicator) {
    GpuRank gpu(communicator);
    constexpr size_t kBytes[] = {64, 4096, 300'000};  // no float: no kernel waits
    std::vector<std::byte*> memories;
    for (size_t bytes : kBytes) {
      memories.push_back(gpu.take(bytes, false));
      memories.push_back(gpu.take(bytes, true));
    }
    for (size_t i = 0; i < memories.size(); ++i) {
      const std::vector<int32_t> ones(kBytes[i / 2] / 4, 1);
      const auto* bytes = reinterpret_cast<const std::byte*>(ones.data());
      gpu.put(memories[i], {bytes, bytes + kBytes[i / 2]});
    }
    std::mt19937 random(rank);
    for (int call = 0; call < kCalls; ++call) {
      if (call % kWorld == rank) std::this_thread::sleep_for(std::chrono::milliseconds(random() % 5));
      const size_t i = call % memories.size();
      gpu.run(testing::all_reduce_of(memories[i], kBytes[i / 2], DType::Int32));
    }
    for (size_t i = 0; i < memories.size(); ++i) {
      int32_t wanted = 1;
      for (size_t call = i; call < kCalls; call += memories.size())
        wanted = static_cast<int32_t>(static_cast<uint32_t>(wanted) * kWorld);
      const auto result = gpu.get(memories[i], kBytes[i / 2]);
      for (size_t at = 0; at < result.size(); at += 4) CHECK(std::memcmp(&result[at], &wanted, 4) == 0);
    }
  });
}

// Each call is one kernel, of one shot or of two, of few blocks or of many, which cut the memory otherwise each time.
// Ranks are late at any point.
TEST(gpu_all_reduces_of_changing_sizes_in_one_kernel) {
  constexpr int kWorld = 3, kCalls = 60, kRounds = 4;
  constexpr size_t kMost = 60'000;
  setenv("SOFTWARE_CUDA_JITTER_US", "500", 1);  // nothing to a real device
  run_job(kWorld, kPatient, [&](int rank, Communicator& communicator) {
    GpuRank gpu(communicator);
    std::byte* memory = gpu.take(4 * kMost * kCalls, false);
    std::mt19937 random(1);  // the same sizes on all ranks
    for (int round = 0; round < kRounds; ++round) {
      std::vector<size_t> counts;
      std::vector<float> words(kMost * kCalls);
      for (size_t i = 0; i < words.size(); ++i) words[i] = static_cast<float>(i % 100'000 * (rank + 1));
      const auto* bytes = reinterpret_cast<const std::byte*>(words.data());
      gpu.put(memory, {bytes, bytes + 4 * words.size()});
      for (int call = 0; call < kCalls; ++call) {
        counts.push_back(random() % 2 ? 1 + random() % 2048 : 1 + random() % kMost);
        gpu.run(testing::all_reduce_of(memory + 4 * kMost * call, 4 * counts.back(), DType::Float32));
      }
      const auto result = gpu.get(memory, 4 * words.size());
      for (int call = 0; call < kCalls; ++call)
        for (size_t i = kMost * call; i < kMost * call + counts[call]; ++i) {
          const auto wanted = static_cast<float>(i % 100'000 * (kWorld * (kWorld + 1) / 2));
          CHECK(std::memcmp(&result[4 * i], &wanted, 4) == 0);
        }
    }
    for (const char* path : {"one_shot_bytes", "staged_bytes"}) CHECK(gpu.group().counters().at(path) > 0);
  });
  unsetenv("SOFTWARE_CUDA_JITTER_US");
}

}  // namespace syncengine
