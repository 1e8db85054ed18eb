// The ranks of a communicator, each with a device: collectives on device memory, in the order of a CUDA stream.
//
// Ownership: shared_ptr; keeps the communicator alive. close() must come before the communicator's; destructors of the
// kinds of group call it, too. Thread-safety: any thread; calls of one group must be queued in the same order on all
// ranks, and their streams must be ordered among each other. Aliasing: as in Operation. The memory belongs to the
// operation until the stream has passed it. Failure: InvalidUsage at once for what can't work here; an error that a
// stream meets later fails the communicator, so that the next call throws.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "engine/communicator/communicator.h"

struct CUstream_st;  // a cudaStream_t points to it

namespace syncengine::cuda {

class PinnedMemory;

// The interface of all kinds of group. Public calls are virtual, so that a build without CUDA need not implement them.
class DeviceGroup {
 public:
  virtual ~DeviceGroup() = default;

  // Queues the operation on `stream`, a cudaStream_t of this device. Never waits for peers: the stream does. Spans are
  // device memory, and Operation::flags is null. May be captured into a graph.
  virtual void run(const Operation& operation, void* stream);

  // Allocates device memory that all peers' kernels reach, if they can: collectives on it copy nothing. On one host,
  // the call is collective, with the same `bytes` on all ranks; an operation is direct if all ranks give memory of the
  // same call at the same offset. The deleter may run any time; a later allocate() or close() gives the memory back,
  // when no peer needs it any more, and a deleter that runs after close() frees it, which waits for the device. Between
  // hosts, the memory is this rank's alone.
  virtual std::shared_ptr<void> allocate(size_t bytes, const std::function<void()>& interrupted);

  // Returns words in which operations of this group may note NaN and infinity, at the host's and the device's address:
  // the same in each call, since a stream may still write them when nobody looks at them any more.
  virtual Nonfinite words_for_nonfinite();

  std::map<std::string, uint64_t> counters() const {
    std::lock_guard lock(mutex_);
    return counters_;
  }

  // Waits for the device, and a moment for the peers to have let go of this rank's memory. Idempotent.
  virtual void close();

 protected:
  DeviceGroup(std::shared_ptr<Communicator> communicator, int device)
      : communicator_(std::move(communicator)), device_(device) {}

  // The parts that differ between kinds of group, called under the lock.
  virtual const char* enqueue(const Operation& operation, CUstream_st* stream) = 0;  // the counter of its bytes
  virtual void throw_if_failed() const { communicator_->throw_if_failed(); }
  virtual void release() = 0;  // called once
  void require_open() const;

  const std::shared_ptr<Communicator> communicator_;
  const int device_;
  std::map<std::string, uint64_t> counters_;
  mutable std::mutex mutex_;

 private:
  bool closed_ = false;
  std::shared_ptr<PinnedMemory> nonfinite_;
};

// Whether this build has a CUDA side.
bool is_built();

// Throws InvalidUsage, which says whether a build with CUDA, a driver or a device is missing.
void require_device(int device);

// Whether a cudaStream_t is being captured into a graph.
bool is_capturing(void* stream);

// Connects the ranks of the communicator; collective, blocks. On one host devices reach each other; between hosts bytes
// go through pinned memory and the communicator's own transports.
std::shared_ptr<DeviceGroup> connect(std::shared_ptr<Communicator> communicator, int device,
                                     const std::function<void()>& interrupted);

}  // namespace syncengine::cuda
