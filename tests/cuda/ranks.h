// Ranks with a GPU each, for tests: as threads of this process, or as processes.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "collectives/operation.h"
#include "cuda/device/stream.h"
#include "cuda/device_group.h"
#include "job.h"

namespace syncengine::testing {

// A rank's group on `device`, and a stream of the program's.
class GpuRank {
 public:
  explicit GpuRank(Communicator& communicator, int device = 0);
  ~GpuRank();

  cuda::DeviceGroup& group() { return *group_; }

  // Device memory: all peers', or plain. Given back with this: cudaFree waits for the whole device, on which a rank of
  // another thread may be ahead.
  std::byte* take(size_t bytes, bool shared);
  void put(void* memory, const std::vector<std::byte>& content);
  void run(const Operation& operation) { group_->run(operation, stream_); }
  // Waits for the stream.
  std::vector<std::byte> get(const void* memory, size_t bytes);
  void wait();

 private:
  std::shared_ptr<cuda::DeviceGroup> group_;
  cudaStream_t stream_ = nullptr;
  std::vector<std::shared_ptr<void>> taken_;
};

// `count` times `value`, as bytes.
std::vector<std::byte> floats(size_t count, float value);

// What processes of a test share.
struct Meeting {
  std::atomic<int> arrived;
  std::atomic<int> flags[8];  // the test's own
  std::atomic<pid_t> pids[16];
  char addresses[16][1024];
};

// Runs this program once for each rank, as the only test `test`, which has to be the caller; there calls body. Fails
// unless each rank ends with its status in `ends`, as waitpid() gives it: 0 for a body that returned. A communicator is
// closed with its body. FAULT_OF_RANK_1, in the environment, is that rank's SYNCENGINE_TEST_FAULT.
using ProcessBody = std::function<void(int rank, Communicator& communicator, Meeting& meeting)>;
void run_processes(const char* test, const std::vector<int>& ends, const Options& options, const ProcessBody& body);

}  // namespace syncengine::testing
