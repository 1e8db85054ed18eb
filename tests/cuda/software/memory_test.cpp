// Memory that is left afterwards. A real device tells of all processes' memory at once; this one tells of the own.
#include "ranks.h"

namespace syncengine {

namespace {

using testing::contains;
using testing::floats;
using testing::GpuRank;
using testing::Meeting;

size_t free_memory() {
  size_t free = 0, total = 0;
  cuda::check(cudaMemGetInfo(&free, &total), "asking for free memory");
  return free;
}

}  // namespace

constexpr size_t kCount = 5000;  // floats; direct, as both processes are on one device

// What is dropped by all is given back; a closed group keeps nothing.
TEST(gpu_memory_is_given_back) {
  testing::run_processes("gpu_memory_is_given_back", {0, 0}, Options{.timeout = seconds(30)},
                         [](int rank, Communicator& communicator, Meeting&) {
                           cuda::require_device(0);
                           const size_t before = free_memory();
                           {
                             GpuRank gpu(communicator);
                             for (int round = 0; round < 50; ++round) {
                               auto memory = gpu.group().allocate(1 << 20, {});
                               auto* data = static_cast<std::byte*>(memory.get());
                               gpu.put(data, floats(kCount, static_cast<float>(rank)));
                               gpu.run(testing::all_reduce_of(data, 4 * kCount, DType::Float32));
                               CHECK(gpu.get(data, 4 * kCount) == floats(kCount, 1));
                             }
                             CHECK_EQ(gpu.group().counters().at("direct_bytes"), uint64_t{50 * 4 * kCount});
                             CHECK(before - free_memory() < (56 << 20));  // staging, and one or two of these
                           }
                           CHECK_EQ(free_memory(), before);
                         });
}

// The ranks' memory stays then: nobody knows any more who has it open.
TEST(gpu_memory_of_different_sizes) {
  testing::run_processes("gpu_memory_of_different_sizes", {0, 0}, Options{.timeout = seconds(30)},
                         [](int rank, Communicator& communicator, Meeting&) {
                           GpuRank gpu(communicator);
                           gpu.take(1000, true);
                           const auto text = CHECK_THROWS(gpu.group().allocate(rank + 1, {}), ErrorKind::Mismatch);
                           CHECK(contains(text, "all ranks make the same tensors in the same order"));
                         });
}

}  // namespace syncengine
