// Collectives on a device, ranks as threads: bits against the oracle of the CPU's kernels.
#include <random>

#include "cuda_cases.h"
#include "kernels_oracle.h"
#include "ranks.h"

namespace syncengine {

namespace {

using testing::GpuRank;
using testing::run_job;

Options with(Algorithm algorithm) {
  Options options;
  options.algorithm = algorithm;
  options.timeout = seconds(60);
  return options;
}

// Any bits: NaN, infinities and subnormals are among them. Bools are 0 or 1.
std::vector<std::byte> values(DType dtype, int rank, size_t count, int round) {
  std::mt19937 random(round * 64 + rank + 1);
  std::vector<std::byte> bytes(count * element_size(dtype));
  for (auto& byte : bytes) byte = static_cast<std::byte>(dtype == DType::Bool ? random() % 2 : random() >> 8);
  return bytes;
}

void check_all_reduce(GpuRank& gpu, int rank, int world, DType dtype, ReduceOp op, void* memory, size_t count) {
  std::vector<std::vector<std::byte>> inputs;
  std::vector<const void*> sources;
  for (int peer = 0; peer < world; ++peer) inputs.push_back(values(dtype, peer, count, static_cast<int>(op)));
  for (auto& input : inputs) sources.push_back(input.data());
  const double scale = op == ReduceOp::Avg ? 1.0 / world : 1.0;
  const auto expected = testing::expected({dtype, op, kernels::Rounding::Once, scale}, sources, count);
  auto operation = testing::all_reduce_of(memory, inputs[rank].size(), dtype, op);
  operation.postscale = scale;
  gpu.put(memory, inputs[rank]);
  gpu.run(operation);
  const auto result = gpu.get(memory, inputs[rank].size());
  const long wrong = testing::first_difference(dtype, result.data(), expected.data(), count);
  if (wrong >= 0)
    throw testing::Failure(std::string(name(dtype)) + " " + name(op) + ", " + std::to_string(count) + " elements, " +
                           std::to_string(world) + " ranks: element " + std::to_string(wrong));
}

void all_dtypes_and_ops(Algorithm algorithm, const char* path) {
  for (int world : {2, 3, 8})
    run_job(world, with(algorithm), [&](int rank, Communicator& communicator) {
      GpuRank gpu(communicator);
      std::byte* memory = gpu.take(8 * 1000, algorithm == Algorithm::Direct);
      for (int d = 0; d <= static_cast<int>(DType::Bool); ++d)
        for (ReduceOp op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max})
          for (size_t count : {1, 37, 1000})
            if (const auto dtype = static_cast<DType>(d); is_supported(dtype, op))
              check_all_reduce(gpu, rank, world, dtype, op, memory, count);
      CHECK(gpu.group().counters().at(path) > 0);
    });
}

}  // namespace

TEST(gpu_all_reduce_in_one_kernel) { all_dtypes_and_ops(Algorithm::Auto, "one_shot_bytes"); }
TEST(gpu_all_reduce_staged) { all_dtypes_and_ops(Algorithm::Staged, "staged_bytes"); }
TEST(gpu_all_reduce_direct) { all_dtypes_and_ops(Algorithm::Direct, "direct_bytes"); }

TEST(gpu_collectives_in_every_order_of_additions) {
  for (int world : {2, 3, 5})
    run_job(world, with(Algorithm::Auto), [&](int rank, Communicator& communicator) {
      GpuRank gpu(communicator);
      int round = 0;
      for (auto collective : {Collective::AllReduce, Collective::Broadcast, Collective::ReduceScatter,
                              Collective::AllGather, Collective::Barrier})
        for (Path path : {Path::OneShot, Path::Staged, Path::Direct})
          for (Numerics numerics : {Numerics::RankOrder, Numerics::Ring})
            for (size_t count : {0, 1, 37, 40'000})
              testing::check_case(gpu, {collective, path, false, numerics, DType::BFloat16, count}, rank, world,
                                  ++round);
    });
}

// More than staging has room for, on few blocks and on many.
TEST(gpu_all_reduce_in_many_chunks) {
  constexpr int kWorld = 3;
  constexpr size_t kCount = 11'000'003;
  for (bool direct : {false, true})
    run_job(kWorld, with(Algorithm::Auto), [&](int rank, Communicator& communicator) {
      GpuRank gpu(communicator);
      std::byte* memory = gpu.take(4 * kCount, direct);
      std::vector<std::byte> words(4 * kCount);
      auto at = [](size_t i, int whose) { return static_cast<int32_t>((i + 1) * 2654435761u * (whose + 3)); };
      for (size_t i = 0; i < kCount; ++i) {
        const int32_t word = at(i, rank);
        std::memcpy(&words[4 * i], &word, 4);
      }
      gpu.put(memory, words);
      gpu.run(testing::all_reduce_of(memory, words.size(), DType::Int32));
      words = gpu.get(memory, words.size());
      for (size_t i = 0; i < kCount; ++i) {
        uint32_t sum = 0;
        for (int whose = 0; whose < kWorld; ++whose) sum += static_cast<uint32_t>(at(i, whose));
        CHECK(std::memcmp(&words[4 * i], &sum, 4) == 0);
      }
    });
}

// Queued all at once, without a wait between them; each rank's host is late in turn.
TEST(gpu_collectives_queue_up) {
  constexpr int kWorld = 4, kCalls = 40;
  run_job(kWorld, with(Algorithm::Auto), [&](int rank, Communicator& communicator) {
    GpuRank gpu(communicator);
    constexpr size_t kBytes[] = {64, 4096, 300'000};  // the last one is too large for one kernel
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

// In one kernel each, of few blocks and of many in turn, that cut the same memory otherwise each time; ranks are late
// at any point.
TEST(gpu_small_all_reduces_of_changing_sizes) {
  constexpr int kWorld = 3, kCalls = 60, kRounds = 4;
  constexpr size_t kMost = 32'000;
  setenv("SOFTWARE_CUDA_JITTER_US", "500", 1);  // nothing to a real device
  run_job(kWorld, with(Algorithm::Auto), [&](int rank, Communicator& communicator) {
    GpuRank gpu(communicator);
    std::byte* memory = gpu.take(4 * kMost * kCalls, false);
    std::mt19937 random(1);  // the same sizes on all ranks
    for (int round = 0; round < kRounds; ++round) {
      std::vector<size_t> counts;
      std::vector<int32_t> words(kMost * kCalls);
      for (size_t i = 0; i < words.size(); ++i) words[i] = static_cast<int32_t>(i * (rank + 1));
      const auto* bytes = reinterpret_cast<const std::byte*>(words.data());
      gpu.put(memory, {bytes, bytes + 4 * words.size()});
      for (int call = 0; call < kCalls; ++call) {
        counts.push_back(random() % 2 ? 1 + random() % 2048 : 1 + random() % kMost);
        gpu.run(testing::all_reduce_of(memory + 4 * kMost * call, 4 * counts.back(), DType::Int32));
      }
      const auto result = gpu.get(memory, 4 * words.size());
      for (int call = 0; call < kCalls; ++call)
        for (size_t i = kMost * call; i < kMost * call + counts[call]; ++i) {
          const auto wanted = static_cast<int32_t>(i * (kWorld * (kWorld + 1) / 2));
          CHECK(std::memcmp(&result[4 * i], &wanted, 4) == 0);
        }
    }
    CHECK(gpu.group().counters().at("one_shot_bytes") > 0);
  });
  unsetenv("SOFTWARE_CUDA_JITTER_US");
}

}  // namespace syncengine
