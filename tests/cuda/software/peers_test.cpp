// Several devices: peer access that is allowed, refused, or granted and not true. Only a software device has them all.
#include <cstdlib>
#include <map>

#include "cuda/device/memory.h"
#include "ranks.h"

namespace syncengine {

namespace {

using testing::GpuRank;

constexpr int kWorld = 3;
const std::vector<int> kAllWell(kWorld, 0);  // how the ranks end

// How ranks name devices: each its own number; all, a device of their own, 0; or each by another number the same
// device.
enum class Names { Own, Zero, OneDevice };

struct Machine {
  const char* peers;
  bool by_process;  // ranks are processes, not threads
  Names names;
  bool host_staging;  // what should come of it
};

// As a rank sees it. CUDA_VISIBLE_DEVICES of processes alone.
int device_of(const Machine& machine, int rank) {
  const char* const last_is_2[] = {"2", "1,2", "0,1,2"};
  if (machine.names == Names::Zero) setenv("CUDA_VISIBLE_DEVICES", std::to_string(rank).c_str(), 1);
  if (machine.names == Names::OneDevice) setenv("CUDA_VISIBLE_DEVICES", last_is_2[rank], 1);
  return machine.names == Names::Zero ? 0 : rank;
}

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
  GpuRank gpu(communicator, device_of(machine, rank));
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
    testing::run_processes(test, kAllWell, options,
                           [&](int rank, Communicator& communicator, auto&) { run_rank(machine, rank, communicator); });
  } else {
    testing::run_job(kWorld, options,
                     [&](int rank, Communicator& communicator) { run_rank(machine, rank, communicator); });
  }
  unsetenv("SOFTWARE_CUDA_PEERS");
  unsetenv("CUDA_VISIBLE_DEVICES");
}

}  // namespace

TEST(gpu_peers_that_are_refused_to_threads) { run("", {"refused", false, Names::Own, true}); }
TEST(gpu_peers_of_threads) { run("", {"allowed", false, Names::Own, false}); }
TEST(gpu_peers_of_processes) { run("gpu_peers_of_processes", {"allowed", true, Names::Own, false}); }
TEST(gpu_peers_that_see_one_device) { run("gpu_peers_that_see_one_device", {"allowed", true, Names::Zero, false}); }
TEST(gpu_peers_that_name_one_device_differently) {
  run("gpu_peers_that_name_one_device_differently", {"refused", true, Names::OneDevice, false});
}
TEST(gpu_peers_that_are_refused_to_processes) {
  run("gpu_peers_that_are_refused_to_processes", {"refused", true, Names::Own, true});
}
TEST(gpu_peers_that_lie) { run("gpu_peers_that_lie", {"lying", true, Names::Zero, true}); }
TEST(gpu_peers_that_are_read_only) { run("gpu_peers_that_are_read_only", {"read_only", true, Names::Zero, true}); }
TEST(gpu_peers_that_export_nothing) { run("gpu_peers_that_export_nothing", {"unshared", true, Names::Own, true}); }

// Ranks 0 and 1 on one device, which they call by different numbers, rank 2 on another.
TEST(gpu_peers_that_are_not_reached_are_named_with_the_reason) {
  const std::map<std::string, std::string> reasons = {
      {"refused", "cudaErrorPeerAccessUnsupported"},
      {"lying", "it reads something else there"},
      {"read_only", "what it writes does not arrive"},
  };
  for (const auto& [peers, why] : reasons) {
    setenv("SOFTWARE_CUDA_PEERS", peers.c_str(), 0);  // 0: a rank has its own
    testing::run_processes(
        "gpu_peers_that_are_not_reached_are_named_with_the_reason", kAllWell, {},
        [&reasons](int rank, Communicator& communicator, auto&) {
          setenv("CUDA_VISIBLE_DEVICES", rank == 0 ? "0" : rank == 1 ? "1,0" : "1", 1);
          cuda::check(cudaSetDevice(rank == 1 ? 1 : 0), "choosing a device");
          cuda::DeviceMemory own(sizeof(cuda::ProofArea));
          const cuda::PeerMemory memory(communicator, own, {});
          CHECK(memory.take_turns);
          const std::string reason = reasons.at(std::getenv("SOFTWARE_CUDA_PEERS"));
          CHECK_EQ(memory.unreachable,
                   "rank 0 can't use the memory of rank 2; rank 1 that of rank 2; rank 2 that of rank 0, 1: " + reason);
        });
    unsetenv("SOFTWARE_CUDA_PEERS");
  }
}

// What staging has shown need not hold for each later piece of memory.
TEST(gpu_memory_that_peers_do_not_reach_is_staged) {
  testing::run_processes("gpu_memory_that_peers_do_not_reach_is_staged", kAllWell, Options{.timeout = seconds(30)},
                         [](int rank, Communicator& communicator, auto&) {
                           setenv("CUDA_VISIBLE_DEVICES", std::to_string(rank).c_str(), 1);
                           GpuRank gpu(communicator);
                           for (const char* peers : {"refused", "lying", "read_only"}) {
                             setenv("SOFTWARE_CUDA_PEERS", peers, 1);
                             for (size_t count : {5, 9000}) check_all_reduce(gpu, rank, true, count);
                             CHECK_EQ(gpu.group().counters()["direct_bytes"], uint64_t{0});
                           }
                           setenv("SOFTWARE_CUDA_PEERS", "allowed", 1);
                           check_all_reduce(gpu, rank, true, 9000);
                           CHECK_EQ(gpu.group().counters()["direct_bytes"], uint64_t{4 * 9000});
                         });
}

}  // namespace syncengine
