// The ranks of a communicator, each with a device: collectives on device memory, in the order of a CUDA stream.
//
// Ownership: shared_ptr; keeps the communicator alive. close() before the communicator's; a group of a kind calls it in
// its destructor, too. Thread-safety: any thread; calls of one group must be queued in the same order on all ranks, and
// their streams must be ordered among each other. Aliasing: as in Operation. The memory belongs to the operation until
// the stream has passed it. Failure: InvalidUsage at once for what can't work here; what a stream meets later fails the
// communicator: the next call throws.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "engine/communicator/communicator.h"
#include "engine/progress/options.h"

struct CUstream_st;  // a cudaStream_t points to it

namespace syncengine::cuda {

// What is called from outside is virtual: a build without CUDA has this class, and nothing of what it does.
class DeviceGroup {
 public:
  virtual ~DeviceGroup() = default;

  int device() const { return device_; }

  // Queues the operation on `stream`, a cudaStream_t of this device. Never waits for peers: the stream does. Spans are
  // device memory. May be captured into a graph.
  virtual void run(const Operation& operation, void* stream);

  // Device memory that all peers' kernels reach, on one host, if they do: collectives on it copy nothing. Collective,
  // with the same `bytes` on all ranks; an operation is direct if all ranks give memory of the same call at the same
  // place. The deleter may run any time; the memory is given back by a later allocate() or close(), when no peer needs
  // it any more. Between hosts: memory that is this rank's alone.
  virtual std::shared_ptr<void> allocate(size_t bytes, const std::function<void()>& interrupted);

  // Words that operations of this group may note in: for host and device.
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

  // What a kind of group adds, under the lock.
  virtual const char* enqueue(const Operation& operation, CUstream_st* stream) = 0;  // the counter of its bytes
  virtual void throw_if_failed() const { communicator_->throw_if_failed(); }
  virtual void release() = 0;  // once
  void require_open() const;

  const std::shared_ptr<Communicator> communicator_;
  const int device_;
  std::map<std::string, uint64_t> counters_;
  mutable std::mutex mutex_;

 private:
  bool closed_ = false;
};

// Whether this build has a CUDA side.
bool is_built();

// Throws InvalidUsage that says what is missing: a build with CUDA, a driver, a device.
void require_device(int device);

// Whether a cudaStream_t is being captured into a graph.
bool is_capturing(void* stream);

// Collective over the communicator. Blocks. On one host devices reach each other; between hosts bytes go through pinned
// memory and the communicator's own ways.
std::shared_ptr<DeviceGroup> connect(std::shared_ptr<Communicator> communicator, int device,
                                     const std::function<void()>& interrupted);

}  // namespace syncengine::cuda
