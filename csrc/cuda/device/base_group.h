// What all groups of real devices are alike in: who may call, from the first operation to close(), and what is counted.
//
// A group calls close() in its destructor. Thread-safety: as DeviceGroup; what a group adds is called under the lock.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "cuda/device/connect.h"
#include "cuda/device/memory.h"
#include "cuda/device_group.h"

namespace syncengine::cuda {

class BaseGroup : public DeviceGroup {
 public:
  int device() const final { return device_; }

  void run(const Operation& operation, void* stream) final {
    std::lock_guard lock(mutex_);
    require_open();
    require_possible(operation);
    const UseDevice use(device_);
    const char* way = enqueue(operation, static_cast<cudaStream_t>(stream));
    ++counters_["operations"];
    counters_[way] += operation.input.bytes();
  }

  std::shared_ptr<void> allocate(size_t bytes, const std::function<void()>&) override {
    return take_own_memory(*communicator_, device_, bytes);
  }

  std::map<std::string, uint64_t> counters() const final {
    std::lock_guard lock(mutex_);
    return counters_;
  }

  void close() final {
    std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return;
    const UseDevice use(device_);
    release();
  }

 protected:
  BaseGroup(std::shared_ptr<Communicator> communicator, int device)
      : communicator_(std::move(communicator)), device_(device) {}

  virtual const char* enqueue(const Operation& operation, cudaStream_t stream) = 0;  // the counter of its bytes
  virtual void throw_if_failed() const { communicator_->throw_if_failed(); }
  virtual void release() = 0;  // once
  void require_open() const {
    if (closed_) throw Error(ErrorKind::InvalidUsage, kClosed);
    throw_if_failed();
  }

  const std::shared_ptr<Communicator> communicator_;
  const int device_;
  std::map<std::string, uint64_t> counters_;
  mutable std::mutex mutex_;

 private:
  bool closed_ = false;
};

}  // namespace syncengine::cuda
