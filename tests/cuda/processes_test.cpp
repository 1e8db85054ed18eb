// Ranks as processes: memory by IPC handles, deaths and stops.
#include <signal.h>
#include <unistd.h>

#include <cmath>

#include "ranks.h"

namespace syncengine {

namespace {

using testing::contains;
using testing::floats;
using testing::GpuRank;
using testing::Meeting;

// Ranks have a device each, if there are so many: else no kernel waits.
int device_of(int rank) {
  int devices = 0;
  cuda::check(cudaGetDeviceCount(&devices), "counting devices");
  return rank % devices;
}

// By one shot and by two in a kernel, and direct.
struct Tensors {
  explicit Tensors(GpuRank& gpu) {
    for (size_t i = 0; i < 3; ++i) memories.push_back(gpu.take(4 * kCounts[i], i == 2));
  }
  static constexpr size_t kCounts[] = {100, 100'000, 2'200'000};
  std::vector<std::byte*> memories;
  Operation operation(size_t i) const { return testing::all_reduce_of(memories[i], 4 * kCounts[i], DType::Float32); }
};

// Ranks with a device and tensors, which end as `ends` says.
void run_with_tensors(const char* test, const std::vector<int>& ends, double timeout,
                      const std::function<void(int, GpuRank&, const Tensors&, Meeting&)>& body) {
  const Options options{.timeout = seconds(timeout), .log_after = seconds(60)};
  testing::run_processes(test, ends, options, [&](int rank, Communicator& communicator, Meeting& meeting) {
    GpuRank gpu(communicator, device_of(rank));
    body(rank, gpu, Tensors(gpu), meeting);
  });
}

void check_results(GpuRank& gpu, const Tensors& tensors, int rank, int world) {
  for (size_t i = 0; i < 3; ++i)
    gpu.put(tensors.memories[i], floats(Tensors::kCounts[i], static_cast<float>(rank + 1)));
  for (size_t i = 0; i < 3; ++i) gpu.run(tensors.operation(i));
  const auto sum = static_cast<float>(world * (world + 1) / 2);
  for (size_t i = 0; i < 3; ++i)
    CHECK(gpu.get(tensors.memories[i], 4 * Tensors::kCounts[i]) == floats(Tensors::kCounts[i], sum));
}

bool all_nan(const std::vector<std::byte>& bytes) {
  for (size_t at = 0; at < bytes.size(); at += 4) {
    float value;
    std::memcpy(&value, &bytes[at], 4);
    if (!std::isnan(value)) return false;
  }
  return true;
}

// Calls each kind of all-reduce, which one peer never does; every stream has to end, with NaN, and the next call gives
// the error.
std::string error_without_peer(GpuRank& gpu, const Tensors& tensors, Meeting& meeting, ErrorKind kind) {
  for (size_t i = 0; i < 3; ++i) gpu.put(tensors.memories[i], floats(Tensors::kCounts[i], 1));
  for (size_t i = 0; i < 3; ++i) gpu.run(tensors.operation(i));
  ++meeting.flags[0];
  gpu.wait();
  for (size_t i = 0; i < 3; ++i) CHECK(all_nan(gpu.get(tensors.memories[i], 4 * Tensors::kCounts[i])));
  return CHECK_THROWS(gpu.run(tensors.operation(0)), kind);
}

// A peer that fails earlier fails the calls themselves.
void wait_for_calls(const Meeting& meeting, int ranks) {
  while (meeting.flags[0] < ranks) usleep(1000);
}

}  // namespace

TEST(gpu_processes_reduce_in_each_others_memory) {
  constexpr int kWorld = 4;
  run_with_tensors("gpu_processes_reduce_in_each_others_memory", std::vector<int>(kWorld, 0), 60,
                   [](int rank, GpuRank& gpu, const Tensors& tensors, Meeting&) {
                     CHECK_EQ(gpu.group().counters().at("host_staging"), uint64_t{0});
                     for (int round = 0; round < 5; ++round) check_results(gpu, tensors, rank, kWorld);
                     const auto counters = gpu.group().counters();
                     for (const char* path : {"one_shot_bytes", "staged_bytes", "direct_bytes"})
                       CHECK(counters.at(path) > 0);
                   });
}

TEST(gpu_process_that_is_killed) {
  run_with_tensors("gpu_process_that_is_killed", {0, SIGKILL, 0}, 60,
                   [](int rank, GpuRank& gpu, const Tensors& tensors, Meeting& meeting) {
                     check_results(gpu, tensors, rank, 3);
                     if (rank == 1) {
                       wait_for_calls(meeting, 2);
                       kill(getpid(), SIGKILL);
                     }
                     const std::string text = error_without_peer(gpu, tensors, meeting, ErrorKind::PeerLost);
                     CHECK(contains(text, "rank 1"));
                   });
}

TEST(gpu_process_that_is_stopped) {
  run_with_tensors("gpu_process_that_is_stopped", {0, SIGKILL}, 5,
                   [](int rank, GpuRank& gpu, const Tensors& tensors, Meeting& meeting) {
                     check_results(gpu, tensors, rank, 2);
                     if (rank == 1) {
                       wait_for_calls(meeting, 1);
                       kill(getpid(), SIGSTOP);
                     }
                     const std::string text = error_without_peer(gpu, tensors, meeting, ErrorKind::Timeout);
                     CHECK(contains(text, "rank 0 waits for rank 1"));
                     kill(meeting.pids[1], SIGKILL);
                   });
}

TEST(gpu_process_that_calls_something_else) {
  run_with_tensors("gpu_process_that_calls_something_else", {0, 0}, 30,
                   [](int rank, GpuRank& gpu, const Tensors& tensors, Meeting&) {
                     auto operation = tensors.operation(2);
                     gpu.put(tensors.memories[2], floats(Tensors::kCounts[2], 1));
                     if (rank == 1) operation.op = ReduceOp::Max;
                     gpu.run(operation);
                     CHECK(all_nan(gpu.get(tensors.memories[2], 4 * Tensors::kCounts[2])));
                     const auto text = CHECK_THROWS(gpu.run(operation), ErrorKind::Mismatch);
                     CHECK(contains(text, "rank 0 called all_reduce(sum"));
                     CHECK(contains(text, "rank 1 called all_reduce(max"));
                   });
}

// One waits in a kernel, if each has a device, and the other one's stream for a word.
TEST(gpu_processes_that_wait_crosswise) {
  run_with_tensors("gpu_processes_that_wait_crosswise", {0, 0}, 30,
                   [](int rank, GpuRank& gpu, const Tensors& tensors, Meeting&) {
                     gpu.put(tensors.memories[2 * rank], floats(Tensors::kCounts[2 * rank], 1));
                     gpu.run(tensors.operation(2 * rank));
                     CHECK(all_nan(gpu.get(tensors.memories[2 * rank], 4 * Tensors::kCounts[2 * rank])));
                     const auto text = CHECK_THROWS(gpu.run(tensors.operation(2 * rank)), ErrorKind::Mismatch);
                     CHECK(contains(text, "100 elements") && contains(text, "2200000 elements"));
                   });
}

TEST(gpu_process_that_leaves) {
  run_with_tensors("gpu_process_that_leaves", {0, 0}, 30,
                   [](int rank, GpuRank& gpu, const Tensors& tensors, Meeting& meeting) {
                     check_results(gpu, tensors, rank, 2);
                     if (rank == 1) return wait_for_calls(meeting, 1);
                     const auto text = error_without_peer(gpu, tensors, meeting, ErrorKind::PeerLost);
                     CHECK(contains(text, "rank 1 has left"));
                   });
}

// On a real device a round takes seconds, which are those of three contexts.
#ifdef SYNCENGINE_SOFTWARE_DEVICE
constexpr int kStep = 1;
#else
constexpr int kStep = 4;
#endif

// At each point of connecting and of taking memory: the others get an error, and give nothing back that somebody may
// have open.
TEST(gpu_process_that_is_killed_while_it_connects) {
  for (int step = 1; step <= 30; step += kStep) {
    setenv("FAULT_OF_RANK_1", ("finished:" + std::to_string(step) + ":kill").c_str(), 0);
    testing::run_processes("gpu_process_that_is_killed_while_it_connects", {0, SIGKILL, 0},
                           Options{.timeout = seconds(30), .log_after = seconds(60)},
                           [](int rank, Communicator& communicator, Meeting&) {
                             try {
                               GpuRank gpu(communicator, device_of(rank));
                               for (;;) gpu.group().allocate(5000, {});
                             } catch (const Error& error) {
                               if (!contains(error.what(), "rank 1")) throw;
                             }
                           });
    unsetenv("FAULT_OF_RANK_1");
  }
}

}  // namespace syncengine
