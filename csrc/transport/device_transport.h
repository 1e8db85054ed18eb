// Moves bytes between the devices of ranks on several hosts, in the order of streams: a process group for CUDA tensors.
// It never reduces.
//
// Ownership: memory is the caller's, until the stream has passed the call. Thread-safety: one thread at a time, but for
// abort(). Calls are queued on the stream that is current for the calling thread (streams/queue.h makes it so), in the
// same order on all ranks. They do not wait for peers: the stream does. Aliasing: as said. Failure: Error for a call
// that can't be queued. What fails on the way may hold the stream until abort().
#pragma once

#include <cstddef>

namespace syncengine {

class DeviceTransport {
 public:
  virtual ~DeviceTransport() = default;

  // First of all. Collective; blocks.
  virtual void connect() = 0;

  // Block r of `to` becomes this rank's block of rank r's `from`; `bytes` a block.
  virtual void all_to_all(std::byte* to, const std::byte* from, size_t bytes) = 0;

  // Block r of `to` becomes rank r's `from`, which may be this rank's block of `to`.
  virtual void all_gather(std::byte* to, const std::byte* from, size_t bytes) = 0;

  virtual void broadcast(std::byte* memory, size_t bytes, int root) = 0;

  // Ends all that is queued, whatever peers do: streams go on, with anything for a result. Any thread. Idempotent.
  virtual void abort() = 0;

  // Last of all, when nothing is queued. May wait for peers, unless it was aborted.
  virtual void close() = 0;
};

}  // namespace syncengine
