// A BucketLane of host memory: for tests of all that is the same on every device, in a build with test hooks.
#pragma once

#include <ATen/ops/from_blob.h>

#include <memory>
#include <utility>
#include <vector>

#include "engine/communicator/communicator.h"
#include "reducer/buckets/bucket_lane.h"
#include "reducer/torch/python_error.h"

namespace syncengine {

class HostMemoryLane final : public BucketLane {
 public:
  explicit HostMemoryLane(std::shared_ptr<Communicator> communicator) : communicator_(std::move(communicator)) {}

  at::Tensor allocate(size_t bytes) override {
    auto memory = communicator_->allocate(bytes);
    void* data = memory.get();
    return at::from_blob(
        data, {static_cast<int64_t>(bytes)}, [memory = std::move(memory)](void*) mutable { memory.reset(); },
        at::kByte);
  }
  c10::Stream current() const override { return c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::kCPU, -1)); }
  c10::Stream own() const override { return current(); }
  void order(c10::Stream /*leader*/, c10::Stream /*follower*/) override {}
  void keep_for(c10::Stream /*stream*/, const at::Tensor& /*tensor*/) override {}
  void all_reduce(Operation operation) override { works_.push_back(communicator_->submit(std::move(operation))); }
  void finish() override {
    for (const auto& work : std::exchange(works_, {})) communicator_->wait(work, raise_pending_signal);
  }

 private:
  std::shared_ptr<Communicator> communicator_;
  std::vector<std::shared_ptr<Work>> works_;
};

}  // namespace syncengine
