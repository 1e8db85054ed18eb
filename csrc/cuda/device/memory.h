// Device memory that other ranks may reach, and host memory that the device reaches.
//
// Ownership: each class gives back what it took. Exported memory must outlive the peers' mappings of it: it is freed
// only if they have said that they are done (groups.cpp), else it stays to the end of the process. Thread-safety: one
// thread at a time, any thread; the caller makes the device current. Failure: InvalidUsage with CUDA's own message.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/memory.h"
#include "cuda/control.h"
#include "engine/communicator/communicator.h"

namespace syncengine::cuda {

// Makes `device` current as long as this object lives. Setting the previous device again at the end makes a CUDA
// context there if it has none; so streams/ makes `device` current first, by a guard of torch's, which avoids that.
class UseDevice {
 public:
  explicit UseDevice(int device);
  ~UseDevice();

 private:
  int before_ = -1;
};

// Memory from cudaMalloc, of the device that was current. It is freed on any thread, whatever device is current there.
class DeviceMemory {
 public:
  explicit DeviceMemory(size_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  void share() { shared_ = true; }     // called before peers are told the address
  void unshare() { shared_ = false; }  // all peers have closed it

 private:
  std::byte* data_ = nullptr;
  size_t bytes_;
  int device_ = 0;
  bool shared_ = false;
};

// Host memory that is pinned, and that the device reaches.
class PinnedMemory {
 public:
  explicit PinnedMemory(Mapping memory);
  explicit PinnedMemory(size_t bytes);  // of this process alone
  ~PinnedMemory() { unpin(); }
  PinnedMemory(const PinnedMemory&) = delete;
  std::byte* data() const { return memory_.data(); }  // for the host, and for copies
  std::byte* on_device() const { return on_device_; }
  void unpin();  // from then on it is the host's alone

 private:
  Mapping memory_;
  std::byte* on_device_ = nullptr;
};

// Makes a stream of the current device that does not wait for the default one, nor for any other.
std::shared_ptr<CUstream_st> make_stream();

// The words in each rank's memory by which ranks prove that they reach each other's memory.
struct ProofArea {
  using Row = std::array<uint32_t, 256>;
  Row own;
  Row read[kMaxRanks];     // from each peer's memory, by this rank's kernel
  Row written[kMaxRanks];  // by each peer's kernel
};

// All ranks' memory, a piece of each, as this rank's kernels reach it. Keeps the peers' memory open. Memory that can't
// be reached is no failure: see `unreachable`.
struct PeerMemory {
  // Collective: gives `own`, which has room for a ProofArea, to all and takes theirs. The driver's answers about access
  // can be wrong, so each rank's kernels read in each peer's memory what the peer has put there, and write what the
  // peer then looks for. Overwrites the ProofArea in `own`. Waits for peers on the host, for no stream of the program.
  PeerMemory(Communicator& communicator, DeviceMemory& own, const std::function<void()>& interrupted);

  // Addresses by rank, this rank's among them; only to be used if all are reached.
  std::vector<std::byte*> bases;
  std::vector<std::shared_ptr<void>> opened;  // mappings of the bases
  // A text that says which ranks can't use whose memory, and why; the same on all ranks. Empty if all can.
  std::string unreachable;
  // Whether several processes share a device, told by its UUID, so that kernels run in turns. The same on all ranks.
  bool take_turns = false;
};

}  // namespace syncengine::cuda
