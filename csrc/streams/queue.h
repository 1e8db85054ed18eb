// The devices of communicators: a cuda::DeviceGroup for each, and torch's streams around it. Uses only c10's
// device-generic classes.
//
// Ownership: a communicator's devices live until close_devices(), and keep it alive. Thread-safety: any thread, without
// the GIL; `interrupted` is called from time to time while the host waits, and may throw. Failure: InvalidUsage without
// CUDA; the communicator's error.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cuda/device_group.h"
#include "engine/communicator/communicator.h"

namespace syncengine {

inline constexpr c10::DeviceType kDeviceType = c10::DeviceType::CUDA;

using Interrupted = std::function<void()>;

// Destroys `thing` while `device` is current. All code here that uses CUDA or c10::Event has such a guard of torch's:
// without it, their cudaSetDevice(), back to the device that was current, makes a context there if it has none.
template <class Thing>
void drop_on(c10::Device device, Thing& thing) noexcept {
  try {
    const c10::DeviceGuard use(device);
    const Thing dropped = std::move(thing);
  } catch (const c10::Error&) {  // at exit CUDA may be gone
  }
}

// The cudaStream_t of a torch stream. Takes the GIL.
void* handle_of(c10::Stream stream);

// Torch's current stream of this thread.
c10::Stream current_stream(c10::Device device);

// Makes `follower` wait: all that it gets from now on comes after all that `leader` has got so far.
void order_streams(c10::Stream leader, c10::Stream follower);

// Keeps torch's allocator from using `memory` again, once its tensor is freed, until `stream` has done all that was
// queued there by then.
void keep_for(c10::Stream stream, const c10::Storage& memory);

// Blocks the host until a stream has reached `done`, an event recorded behind a collective. Past the deadline, aborts
// the communicator with a Timeout that names `call`, and throws it. Called without the GIL.
void wait_on_host(Communicator& communicator, const c10::Event& done, Deadline deadline, const char* call,
                  const Interrupted& interrupted);

// Collectives of one DeviceGroup, in order with torch's streams.
class Queue {
 public:
  Queue(std::shared_ptr<cuda::DeviceGroup> group, c10::Device device);
  ~Queue() { drop_on(device_, last_); }

  cuda::DeviceGroup& group() { return *group_; }
  c10::Stream side() const { return side_; }  // of high priority, for callers that use another than the current one
  void* side_handle() const { return side_handle_; }

  // Queues a collective on `stream`, whose handle is `handle`, behind all that were queued before.
  void run(const Operation& operation, c10::Stream stream, void* handle);

  // Makes a tensor in memory that all peers reach. Collective, blocks.
  at::Tensor empty(const std::vector<int64_t>& sizes, size_t bytes, at::ScalarType type,
                   const Interrupted& interrupted);

 private:
  std::shared_ptr<cuda::DeviceGroup> group_;
  c10::Device device_;
  c10::Stream side_;
  void* side_handle_;
  std::mutex mutex_;
  c10::Event last_;
  std::optional<c10::Stream> last_stream_;
};

// Returns queue `number` of a communicator on `device`: 0 is for its own calls, others are for take_own_queue(). The
// first call for each makes the queue: it is collective, and waits for the other ranks.
std::shared_ptr<Queue> queue_of(const std::shared_ptr<Communicator>& communicator, c10::Device device,
                                const Interrupted& interrupted, int number = 0);

// Takes a queue that nobody else uses, with its own words and staging, so that its collectives need no common order
// with others. Dropping the pointer makes the queue free again. Every call is collective, and blocks.
std::shared_ptr<Queue> take_own_queue(const std::shared_ptr<Communicator>& communicator, c10::Device device,
                                      const Interrupted& interrupted);

// Closes all devices of a communicator. Must come before Communicator::close().
void close_devices(const Communicator* communicator);

// The counters of all devices of the communicator, with "cuda_" in front of each name.
std::map<std::string, uint64_t> device_counters(const Communicator* communicator);

}  // namespace syncengine
