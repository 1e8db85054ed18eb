// The ranks of a communicator, each with a device: collectives on device memory, in the order of a CUDA stream.
//
// Ownership: shared_ptr; keeps the communicator alive. close() before the communicator's.
// Thread-safety: any thread; calls of one group must be queued in the same order on all ranks, and their streams must
// be ordered among each other. Aliasing: as in Operation. The memory belongs to the operation until the stream has
// passed it. Failure: InvalidUsage at once for what can't work here; what a stream meets later fails the communicator:
// the next call throws.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "engine/communicator/communicator.h"
#include "engine/progress/options.h"

namespace syncengine::cuda {

class DeviceGroup {
 public:
  virtual ~DeviceGroup() = default;

  virtual int device() const = 0;

  // Queues the operation on `stream`, a cudaStream_t of this device. Never waits for peers: the stream does. Spans are
  // device memory. May be captured into a graph.
  virtual void run(const Operation& operation, void* stream) = 0;

  // Device memory that all peers' kernels reach, on one host, if they do: collectives on it copy nothing. Collective,
  // with the same `bytes` on all ranks; an operation is direct if all ranks give memory of the same call at the same
  // place. The deleter may run any time; the memory is given back by a later allocate() or close(), when no peer needs
  // it any more.
  virtual std::shared_ptr<void> allocate(size_t bytes, const std::function<void()>& interrupted) = 0;

  // Words that operations of this group may note in: for host and device.
  virtual Nonfinite words_for_nonfinite() = 0;

  virtual std::map<std::string, uint64_t> counters() const = 0;

  // Waits for the device, and a moment for the peers to have let go of this rank's memory. Idempotent.
  virtual void close() = 0;
};

// Whether this build has a CUDA side.
bool is_built();

// Throws InvalidUsage that says what is missing: a build with CUDA, a driver, a device.
void require_device(int device);

// Whether a cudaStream_t is being captured into a graph.
bool is_capturing(void* stream);

// Collective over the communicator. Blocks. On one host devices reach each other; between hosts bytes go by the
// communicator's DeviceTransport, or through pinned memory and the communicator's own ways.
std::shared_ptr<DeviceGroup> connect(std::shared_ptr<Communicator> communicator, int device,
                                     const std::function<void()>& interrupted);

}  // namespace syncengine::cuda
