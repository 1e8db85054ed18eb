#include "ranks.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>

namespace syncengine::testing {

GpuRank::GpuRank(Communicator& communicator, int device)
    : group_(cuda::connect(communicator.shared_from_this(), device, {})) {
  cuda::check(cudaSetDevice(device), "choosing a device");
  cuda::check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
}

GpuRank::~GpuRank() {
  cudaStreamDestroy(stream_);
  taken_.clear();
  group_->close();
}

std::byte* GpuRank::take(size_t bytes, bool shared) {
  if (shared) {
    taken_.push_back(group_->allocate(bytes, {}));
  } else {
    void* plain = nullptr;
    cuda::check(cudaMalloc(&plain, std::max<size_t>(bytes, 1)), "taking memory");
    taken_.emplace_back(plain, [](void* data) { cudaFree(data); });
  }
  return static_cast<std::byte*>(taken_.back().get());
}

void GpuRank::put(void* memory, const std::vector<std::byte>& content) {
  if (content.empty()) return;
  cuda::check(cudaMemcpyAsync(memory, content.data(), content.size(), cudaMemcpyHostToDevice, stream_), "copying in");
}

// A copy to pageable memory that waits for its stream may keep the process's other threads, which are peers, from
// launching.
std::vector<std::byte> GpuRank::get(const void* memory, size_t bytes) {
  std::vector<std::byte> content(bytes);
  wait();
  if (bytes > 0)
    cuda::check(cudaMemcpyAsync(content.data(), memory, bytes, cudaMemcpyDeviceToHost, stream_), "copying out");
  wait();
  return content;
}

void GpuRank::wait() { cuda::check(cudaStreamSynchronize(stream_), "waiting for a stream"); }

std::vector<std::byte> floats(size_t count, float value) {
  const std::vector<float> content(count, value);
  const auto* bytes = reinterpret_cast<const std::byte*>(content.data());
  return {bytes, bytes + 4 * count};
}

namespace {

constexpr const char *kRank = "CUDA_TEST_RANK", *kMeeting = "CUDA_TEST_MEETING";

Meeting& map(int fd) {
  void* address = mmap(nullptr, sizeof(Meeting), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  CHECK(address != MAP_FAILED);
  return *static_cast<Meeting*>(address);
}

[[noreturn]] void be_rank(int rank, int world, Options options, const ProcessBody& body) {
  int status = 0;
  if (const char* fault = std::getenv("FAULT_OF_RANK_1"); fault && rank == 1) setenv("SYNCENGINE_TEST_FAULT", fault, 1);
  try {
    Meeting& meeting = map(std::atoi(std::getenv(kMeeting)));
    if (options.arena_bytes == 0) options.arena_bytes = 256 << 20;
    LocalBootstrap job(rank, world, options);
    const std::string address = job.address();
    address.copy(meeting.addresses[rank], sizeof(meeting.addresses[rank]));
    ++meeting.arrived;
    const auto deadline = Deadline::after(seconds(20));
    while (meeting.arrived < world && !deadline.passed()) usleep(1000);
    std::vector<std::string> addresses;
    for (int peer = 0; peer < world; ++peer) addresses.emplace_back(meeting.addresses[peer], address.size());
    auto communicator = job.connect(addresses, deadline);
    body(rank, *communicator, meeting);
    communicator->close();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    status = 1;
  }
  std::fflush(nullptr);
  _exit(status);
}

}  // namespace

void run_processes(const char* test, const std::vector<int>& ends, const Options& options, const ProcessBody& body) {
  const int world = static_cast<int>(ends.size());
  if (const char* rank = std::getenv(kRank)) be_rank(std::atoi(rank), world, options, body);
  const int fd = memfd_create("meeting", 0);
  CHECK(fd >= 0 && ftruncate(fd, sizeof(Meeting)) == 0);
  Meeting& meeting = map(fd);
  for (int rank = 0; rank < world; ++rank) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      setenv(kRank, std::to_string(rank).c_str(), 1);
      setenv(kMeeting, std::to_string(fd).c_str(), 1);
      execl("/proc/self/exe", "cuda_tests", test, nullptr);
      _exit(127);
    }
    meeting.pids[rank] = child;
  }
  std::vector<int> found(world);
  for (int rank = 0; rank < world; ++rank) waitpid(meeting.pids[rank], &found[rank], 0);
  munmap(&meeting, sizeof(Meeting));
  close(fd);
  CHECK(found == ends);
}

}  // namespace syncengine::testing
