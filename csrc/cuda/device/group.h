// A DeviceGroup of real devices: joins memory, words, sequences and the watchdog.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <vector>

#include "cuda/device/base_group.h"
#include "cuda/device/peer_memory.h"
#include "cuda/sequence.h"
#include "cuda/shared_pages.h"
#include "cuda/watchdog.h"

namespace syncengine::cuda {

class RealDeviceGroup final : public BaseGroup {
 public:
  RealDeviceGroup(std::shared_ptr<Communicator> communicator, int device, const std::function<void()>& interrupted);
  ~RealDeviceGroup() override { close(); }

  std::shared_ptr<void> allocate(size_t bytes, const std::function<void()>& interrupted) override;

 private:
  // Memory of one allocate(), on all ranks.
  struct Segment {
    uint64_t number;
    std::unique_ptr<DeviceMemory> own;
    std::unique_ptr<PeerMemory> peers;
    bool dropped = false;  // its tensor is gone
  };
  // What deleters of allocated memory still reach when the group is gone.
  struct Segments {
    std::mutex mutex;
    std::vector<Segment> list;
  };
  struct Choice {
    Route route;
    uint64_t place = 0;  // must agree between ranks
  };

  const char* enqueue(const Operation& operation, cudaStream_t stream) override;
  void throw_if_failed() const override { watchdog_->throw_if_failed(); }
  void release() override;
  void prepare_staging(const std::function<void()>& interrupted);
  void prove_signals();
  Choice choose(const Operation& operation);
  bool find(const Span& span, Choice& choice) const;
  void give_back_dropped(const std::function<void()>& interrupted);
  void wait_for_peers_to_leave();

  SharedPages pages_;
  std::vector<std::unique_ptr<PinnedMapping>> pinned_pages_;
  std::vector<Control*> controls_;  // as the device sees them
  std::unique_ptr<SharedPages> host_staging_;
  std::vector<std::unique_ptr<PinnedMapping>> pinned_staging_;
  std::unique_ptr<DeviceMemory> staging_;
  std::unique_ptr<PeerMemory> peer_staging_;
  Site site_;
  std::shared_ptr<Segments> segments_ = std::make_shared<Segments>();
  uint64_t segments_so_far_ = 0;
  std::unique_ptr<Watchdog> watchdog_;
};

}  // namespace syncengine::cuda
