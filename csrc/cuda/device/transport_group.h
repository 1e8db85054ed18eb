// A DeviceGroup of ranks on several hosts whose bytes a DeviceTransport moves from device to device. Sums are made
// here, so that their bits are those of the CPU's engine.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <optional>
#include <vector>

#include "cuda/body.h"
#include "cuda/device/base_group.h"
#include "cuda/pieces.h"
#include "cuda/transport_watch.h"
#include "transport/device_transport.h"

namespace syncengine::cuda {

class TransportGroup final : public BaseGroup {
 public:
  TransportGroup(std::shared_ptr<Communicator> communicator, std::unique_ptr<DeviceTransport> transport, int device);
  ~TransportGroup() override { close(); }

 private:
  // `stream` is the current one of the calling thread, on which the transport's calls go as well.
  const char* enqueue(const Operation& operation, cudaStream_t stream) override;
  void release() override;
  void queue(const Operation& operation, const Gate& gate, cudaStream_t stream);
  void begin(const Gate& gate, cudaStream_t stream);
  void end(cudaStream_t stream);
  void stage(const Operation& operation, const Piece& piece, cudaStream_t stream);
  void carry_out(const Operation& operation, const Piece& piece, cudaStream_t stream);
  void deliver(const Operation& operation, const Piece& piece, const Gate& gate, cudaStream_t stream);
  void reduce(const Operation& operation, size_t block, std::byte* result, cudaStream_t stream);

  // Device memory: a piece, what comes from all ranks of one, and each rank's fingerprint.
  std::byte* slot() const { return staging_->data(); }
  std::byte* received() const;
  uint32_t* marks() const;
  TransportWords* words_on_device() const { return reinterpret_cast<TransportWords*>(words_->on_device()); }

  std::unique_ptr<DeviceTransport> transport_;
  const int rank_, world_;
  std::vector<std::vector<int>> hosts_;  // the ranks of each
  std::optional<PinnedMemory> words_;    // TransportWords
  std::unique_ptr<DeviceMemory> staging_;
  std::unique_ptr<TransportWatch> watch_;
};

}  // namespace syncengine::cuda
