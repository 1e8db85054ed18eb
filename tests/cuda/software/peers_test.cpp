// Several devices: peer access that is allowed, refused, or granted and not true. Only a software device has them all.
#include <cstdlib>

#include "ranks.h"

namespace syncengine {

namespace {

using testing::GpuRank;

constexpr int kWorld = 3;

struct Machine {
  const char* peers;
  bool by_process;    // ranks are processes, not threads
  bool one_visible;   // each process sees one device, as number 0
  bool host_staging;  // what should come of it
};

void check_all_reduce(GpuRank& gpu, int rank, bool shared, size_t count) {
  std::byte* memory = gpu.take(4 * count, shared);
  std::vector<int32_t> words(count);
  for (size_t i = 0; i < count; ++i) words[i] = static_cast<int32_t>(i) * (rank + 1);
  const auto* bytes = reinterpret_cast<const std::byte*>(words.data());
  gpu.put(memory, {bytes, bytes + 4 * count});
  gpu.run(testing::all_reduce_of(memory, 4 * count, DType::Int32));
  const auto result = gpu.get(memory, 4 * count);
  for (size_t i = 0; i < count; ++i) {
    const auto wanted = static_cast<int32_t>(i) * (kWorld * (kWorld + 1) / 2);
    CHECK(std::memcmp(&result[4 * i], &wanted, 4) == 0);
  }
}

void run_rank(const Machine& machine, int rank, Communicator& communicator) {
  if (machine.one_visible) setenv("CUDA_VISIBLE_DEVICES", std::to_string(rank).c_str(), 1);
  GpuRank gpu(communicator, machine.one_visible ? 0 : rank);
  CHECK_EQ(gpu.group().counters().at("host_staging"), uint64_t{machine.host_staging});
  for (bool shared : {false, true})
    for (size_t count : {5, 9000, 100'000}) check_all_reduce(gpu, rank, shared, count);
  CHECK_EQ(gpu.group().counters()["direct_bytes"] > 0, !machine.host_staging);
}

void run(const char* test, const Machine& machine) {
  setenv("SOFTWARE_CUDA_PEERS", machine.peers, 1);
  setenv("CUDA_VISIBLE_DEVICES", "0,1,2", 1);
  Options options;
  options.timeout = seconds(30);
  if (machine.by_process) {
    const auto ends = testing::run_processes(test, kWorld, options, [&](int rank, Communicator& communicator, auto&) {
      run_rank(machine, rank, communicator);
    });
    CHECK(ends == std::vector<int>(kWorld, 0));
  } else {
    testing::run_job(kWorld, options,
                     [&](int rank, Communicator& communicator) { run_rank(machine, rank, communicator); });
  }
  setenv("SOFTWARE_CUDA_PEERS", "allowed", 1);
  setenv("CUDA_VISIBLE_DEVICES", "0", 1);
}

}  // namespace

TEST(gpu_peers_that_are_refused_to_threads) { run("", {"refused", false, false, true}); }
TEST(gpu_peers_of_threads) { run("", {"allowed", false, false, false}); }
TEST(gpu_peers_of_processes) { run("gpu_peers_of_processes", {"allowed", true, false, false}); }
TEST(gpu_peers_that_see_one_device) { run("gpu_peers_that_see_one_device", {"allowed", true, true, false}); }
TEST(gpu_peers_that_are_refused_to_processes) {
  run("gpu_peers_that_are_refused_to_processes", {"refused", true, false, true});
}
TEST(gpu_peers_that_lie) { run("gpu_peers_that_lie", {"lying", true, true, true}); }

}  // namespace syncengine
