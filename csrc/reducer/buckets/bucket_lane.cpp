#include "reducer/buckets/bucket_lane.h"

#include <ATen/ops/empty.h>

#include "streams/queue.h"

namespace syncengine {

namespace {

class DeviceLane final : public BucketLane {
 public:
  DeviceLane(std::shared_ptr<Communicator> communicator, c10::Device device)
      : communicator_(std::move(communicator)), device_(device) {}

  at::Tensor allocate(size_t bytes) override {
    const auto size = static_cast<int64_t>(bytes);
    if (communicator_->size() == 1) return at::empty({size}, at::TensorOptions().dtype(at::kByte).device(device_));
    if (!queue_) queue_ = take_own_queue(communicator_, device_, raise_pending_signal);
    return queue_->empty({size}, bytes, at::kByte, raise_pending_signal);
  }
  c10::Stream current() const override { return current_stream(device_); }
  c10::Stream own() const override { return queue_ ? queue_->side() : current(); }
  void order(c10::Stream leader, c10::Stream follower) override { order_streams(leader, follower); }
  void keep_for(c10::Stream stream, const at::Tensor& tensor) override {
    syncengine::keep_for(stream, tensor.storage());
  }
  void all_reduce(Operation operation) override {
    if (queue_) queue_->run(operation, queue_->side(), queue_->side_handle());  // no queue: there is one rank
  }
  void finish() override { communicator_->throw_if_failed(); }  // errors on streams show in later calls
  bool is_captured() const override {
    const c10::DeviceGuard use(device_);
    return queue_ && (cuda::is_capturing(queue_->side_handle()) || cuda::is_capturing(handle_of(current())));
  }
  Nonfinite words_for_nonfinite() override {
    if (!queue_) return host_words_for_nonfinite(communicator_->size());
    wait();  // for an earlier model's kernels, which have the same words
    const c10::DeviceGuard use(device_);
    return queue_->group().words_for_nonfinite();
  }
  void wait() override {
    const c10::DeviceGuard use(device_);
    if (queue_ && cuda::is_capturing(queue_->side_handle())) {
      throw Error(
          ErrorKind::InvalidUsage,
          "nonfinite= looks at each step on the host, so its backward can't be captured into a CUDA graph: leave "
          "nonfinite= out");
    }
    c10::Event done(kDeviceType);
    done.record(own());
    wait_on_host(*communicator_, done, Deadline::after(communicator_->timeout()), "backward", raise_pending_signal);
  }

 private:
  std::shared_ptr<Communicator> communicator_;
  c10::Device device_;
  std::shared_ptr<Queue> queue_;
};

}  // namespace

std::unique_ptr<BucketLane> make_device_lane(const std::shared_ptr<Communicator>& communicator, c10::Device device) {
  cuda::require_device(device.index());
  return std::make_unique<DeviceLane>(communicator, device);
}

}  // namespace syncengine
