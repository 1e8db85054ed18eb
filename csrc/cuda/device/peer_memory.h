// One rank's memory as every other rank's kernels reach it.
//
// Ownership: keeps the peers' memory open. `own` stays until all peers have dropped this (memory.h).
// Thread-safety: one thread at a time, any thread; the device is made current by the caller.
// Failure: what gather() throws; InvalidUsage with CUDA's own words. Memory that can't be reached is none: see
// unreachable().
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda/control.h"
#include "cuda/device/memory.h"
#include "engine/communicator/communicator.h"

namespace syncengine::cuda {

// What the proof needs of each rank's memory.
struct ProofArea {
  struct Row {
    uint32_t words[256];
    bool operator==(const Row&) const = default;
  };
  Row own;
  Row read[kMaxRanks];     // in each peer, by the own kernel
  Row written[kMaxRanks];  // by each peer's kernel
};

class PeerMemory {
 public:
  // Collective: gives `own`, of at least a ProofArea, to all and takes theirs. Drivers' answers about access can be
  // wrong, so each rank's kernels read in each peer's memory what the peer has put there, and write what the peer then
  // looks for. What was in `own`'s ProofArea is lost. Waits for peers on the host, and for no stream of the program.
  PeerMemory(Communicator& communicator, DeviceMemory& own, const std::function<void()>& interrupted);

  // By rank, the own one among them; to be used if all are reached.
  const std::vector<std::byte*>& bases() const { return bases_; }
  // Who can't use whose memory, and why; the same on all ranks. Empty: all can.
  const std::string& unreachable() const { return unreachable_; }
  // That the ranks are on, however many names these have: told apart by UUID.
  int devices() const { return devices_; }

 private:
  std::vector<std::byte*> bases_;
  std::vector<std::shared_ptr<void>> opened_;  // the same, for as long as this lives
  std::string unreachable_;
  int devices_ = 0;
};

}  // namespace syncengine::cuda
