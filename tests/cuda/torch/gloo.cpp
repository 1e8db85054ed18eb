// What DistributedDataParallel over Gloo needs for CUDA tensors, of which a torch without CUDA has none: collectives
// over the host, which waits, and timers that tell nothing. The oracle of tests needs no speed.
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "gloo.h"

namespace software_torch {

namespace {

class Done final : public ::c10d::Work {
 public:
  Done(int rank, ::c10d::OpType type, std::vector<at::Tensor> results)
      : ::c10d::Work(rank, type), results_(std::move(results)) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<c10::Device>{results_.at(0).device()});
    future_->markCompleted(c10::IValue(results_));
    finish();
  }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  std::vector<at::Tensor> results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

std::vector<at::Tensor> copies_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors) copies.push_back(tensor.cpu());
  return copies;
}

void back(const std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < to.size(); ++i) at::Tensor(to[i]).copy_(from[i]);
}

}  // namespace

// Of a Reducer, which has one for its gradients' device.
class NoTimer final : public ::c10d::Timer {
 public:
  explicit NoTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

using WorkPtr = c10::intrusive_ptr<::c10d::Work>;

HostGloo::HostGloo(c10::intrusive_ptr<::c10d::Backend> gloo)
    : ::c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

WorkPtr HostGloo::allreduce(std::vector<at::Tensor>& tensors, const ::c10d::AllreduceOptions& how) {
  if (tensors.at(0).layout() != at::kStrided) return gloo_->allreduce(tensors, how);
  auto copies = copies_of(tensors);
  gloo_->allreduce(copies, how)->wait();
  back(tensors, copies);
  return c10::make_intrusive<Done>(getRank(), ::c10d::OpType::ALLREDUCE, tensors);
}

WorkPtr HostGloo::broadcast(std::vector<at::Tensor>& tensors, const ::c10d::BroadcastOptions& how) {
  auto copies = copies_of(tensors);
  gloo_->broadcast(copies, how)->wait();
  back(tensors, copies);
  return c10::make_intrusive<Done>(getRank(), ::c10d::OpType::BROADCAST, tensors);
}

WorkPtr HostGloo::allgather(std::vector<std::vector<at::Tensor>>& to, std::vector<at::Tensor>& from,
                            const ::c10d::AllgatherOptions& how) {
  std::vector<std::vector<at::Tensor>> copies;
  for (auto& list : to) copies.push_back(copies_of(list));
  auto sources = copies_of(from);
  gloo_->allgather(copies, sources, how)->wait();
  for (size_t i = 0; i < to.size(); ++i) back(to[i], copies[i]);
  return c10::make_intrusive<Done>(getRank(), ::c10d::OpType::ALLGATHER, to.at(0));
}

WorkPtr HostGloo::_allgather_base(at::Tensor& to, at::Tensor& from, const ::c10d::AllgatherOptions& how) {
  at::Tensor copy = to.cpu(), source = from.cpu();
  gloo_->_allgather_base(copy, source, how)->wait();
  back({to}, {copy});
  return c10::make_intrusive<Done>(getRank(), ::c10d::OpType::_ALLGATHER_BASE, std::vector<at::Tensor>{to});
}

WorkPtr HostGloo::barrier(const ::c10d::BarrierOptions& how) { return gloo_->barrier(how); }

}  // namespace software_torch

namespace c10d {
using SoftwareTimer = software_torch::NoTimer;
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, SoftwareTimer)
}  // namespace c10d
