// The kinds of DeviceGroup, and what they share.
//
// Ownership: none. Thread-safety: any thread. Failure: see each function.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cuda/device/memory.h"
#include "cuda/device_group.h"
#include "cuda/proxy.h"
#include "cuda/sequence.h"
#include "cuda/shared_pages.h"
#include "cuda/watchdog.h"
#include "engine/communicator/communicator.h"
#include "engine/lanes/mismatch.h"

namespace syncengine::cuda {

// Calls step(). An Error that keeps this rank from going on would leave the others waiting, so it fails the
// communicator on all ranks before it is rethrown.
template <class Step>
void tell_peers_if_it_fails(Communicator& communicator, Step&& step) {
  try {
    step();
  } catch (const Error& error) {
    const int rank = communicator.global_ranks()[communicator.rank()];
    // A Mismatch is raised as such on all ranks, whichever finds it first; other errors are Aborted on the peers.
    const ErrorKind kind = error.kind() == ErrorKind::Mismatch ? ErrorKind::Mismatch : ErrorKind::Aborted;
    communicator.abort(kind, "rank " + std::to_string(rank) + ": " + error.what());
    throw;
  }
}

// Describes the operation, for texts of errors. Each call computes the text anew.
inline std::string call_text(const Operation& operation) {
  return describe(operation) + (operation.describe ? "" : " on CUDA tensors");
}

// Ranks of one host, whose kernels reach the peers' memory: joins memory, words, sequences and the watchdog.

class PeerGroup final : public DeviceGroup {
 public:
  PeerGroup(std::shared_ptr<Communicator> communicator, int device, const std::function<void()>& interrupted);
  ~PeerGroup() override { close(); }

  std::shared_ptr<void> allocate(size_t bytes, const std::function<void()>& interrupted) override;

 private:
  // Memory of one allocate() call, on all ranks.
  struct Segment {
    uint64_t number = 0;
    std::shared_ptr<DeviceMemory> own;
    std::unique_ptr<const PeerMemory> peers;
    std::atomic<bool> dropped{false};  // its tensor is gone
  };

  const char* enqueue(const Operation& operation, cudaStream_t stream) override;
  void throw_if_failed() const override { watchdog_->throw_if_failed(); }
  void release() override;
  void prepare_staging(const std::function<void()>& interrupted);
  MemoryRoute choose(const Operation& operation) const;
  bool find(const Span& span, MemoryRoute& route) const;
  void give_back_dropped(const std::function<void()>& interrupted);
  Control& words_of(int rank) const { return reinterpret_cast<Control*>(words_->data())[rank]; }

  std::optional<PinnedMemory> words_;         // a Control for each rank
  std::vector<Control*> controls_;            // at the device's addresses
  std::optional<PinnedMemory> host_staging_;  // of all ranks, if there is no peer access
  std::unique_ptr<DeviceMemory> staging_;
  std::unique_ptr<const PeerMemory> peer_staging_;
  Site site_;
  std::vector<std::shared_ptr<Segment>> segments_;  // the same on all ranks; tensors share them
  uint64_t segments_so_far_ = 0;
  std::unique_ptr<Watchdog> watchdog_;
};

// Ranks on several hosts: tensors go through pinned memory to the CPU's engine, and back.

class ProxyGroup final : public DeviceGroup {
 public:
  ProxyGroup(std::shared_ptr<Communicator> communicator, int device, const std::function<void()>& interrupted);
  ~ProxyGroup() override { close(); }

 private:
  const char* enqueue(const Operation& operation, cudaStream_t stream) override;
  void release() override;

  std::shared_ptr<PinnedMemory> slots_;  // a word for each, on a cache line of its own, and then the slots
  std::shared_ptr<Proxy> proxy_;
  cudaEvent_t last_ = nullptr;  // the end of what was queued so far
};

}  // namespace syncengine::cuda
