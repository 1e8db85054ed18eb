#include "nccl.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

namespace software_torch {

namespace {

class QueuedWork final : public ::c10d::Work {
 public:
  QueuedWork(int rank, ::c10d::OpType type, c10::Stream stream, std::vector<at::Tensor> results)
      : ::c10d::Work(rank, type), device_(stream.device()), done_(kCuda), results_(std::move(results)) {
    done_.record(stream);
    const c10::StreamGuard guard(stream);
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<c10::Device>{device_});
    future_->markCompleted(c10::IValue(results_));
  }
  bool isCompleted() override { return done_.query(); }
  bool isSuccess() const override { return done_.query(); }
  bool wait(std::chrono::milliseconds) override { return synchronize(), true; }
  void synchronize() override { done_.block(current_stream(device_.index())); }
  std::vector<at::Tensor> result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  c10::Device device_;
  c10::Event done_;
  std::vector<at::Tensor> results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// Where a tensor lies. Its memory is not kept: whoever frees it too early is to be found out.
struct RawTensor {
  void* data;
  size_t bytes;
  std::vector<int64_t> sizes;
  at::ScalarType type;

  explicit RawTensor(const at::Tensor& tensor)
      : data(tensor.data_ptr()), bytes(tensor.nbytes()), sizes(tensor.sizes().vec()), type(tensor.scalar_type()) {
    TORCH_CHECK(tensor.is_cuda() && tensor.is_non_overlapping_and_dense(), "Tensors must be CUDA and dense");
  }
  at::Tensor copy() const {
    at::Tensor copy = at::empty(sizes, at::TensorOptions().dtype(type));
    std::memcpy(copy.data_ptr(), data, bytes);
    return copy;
  }
  void put(const at::Tensor& copy) const { std::memcpy(data, copy.data_ptr(), bytes); }
};

std::vector<at::Tensor> copies_of_all(const std::vector<RawTensor>& places) {
  std::vector<at::Tensor> copies;
  for (const RawTensor& place : places) copies.push_back(place.copy());
  return copies;
}

}  // namespace

struct HostNccl::State {
  c10::intrusive_ptr<::c10d::Backend> gloo;
  std::atomic<bool> aborted{false};

  // Whether it succeeded. What has failed is held until the abort, as NCCL's kernels are.
  bool finish(const WorkPtr& work) const {
    while (!aborted) {
      if (work && work->isCompleted() && work->isSuccess()) return true;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return false;
  }
};

HostNccl::HostNccl(c10::intrusive_ptr<::c10d::Backend> gloo)
    : ::c10d::Backend(gloo->getRank(), gloo->getSize()), state_(std::make_shared<State>()) {
  state_->gloo = std::move(gloo);
}

// Its thread may be in a call that never ends: the backend is not destroyed.
void HostNccl::abort() {
  if (!state_->aborted.exchange(true)) new c10::intrusive_ptr<::c10d::Backend>(state_->gloo);
}

HostNccl::WorkPtr HostNccl::queue(::c10d::OpType type, const std::vector<at::Tensor>& from,
                                  const std::vector<at::Tensor>& to, Call call) {
  TORCH_CHECK(!state_->aborted, "NCCL communicator was aborted");
  const c10::Stream current = current_stream(to.at(0).device().index());
  if (!stream_) stream_ = stream_from_pool(current.device_index(), /*high_priority=*/true);
  c10::Event reached(kCuda);
  reached.record(current);
  reached.block(*stream_);
  const std::vector<RawTensor> inputs(from.begin(), from.end()), outputs(to.begin(), to.end());
  for (const auto& tensors : {from, to})
    for (const at::Tensor& tensor : tensors) record_stream(tensor.storage().data_ptr(), *stream_);
  enqueue(*stream_, [state = state_, inputs, outputs, call = std::move(call)] {
    if (state->aborted) return;
    auto sources = copies_of_all(inputs), results = copies_of_all(outputs);
    WorkPtr work;
    try {
      work = call(*state->gloo, sources, results);
    } catch (const std::exception&) {  // a peer is gone
    }
    if (!state->finish(work)) return;
    for (size_t i = 0; i < outputs.size(); ++i) outputs[i].put(results[i]);
  });
  return c10::make_intrusive<QueuedWork>(getRank(), type, *stream_, to);
}

HostNccl::WorkPtr HostNccl::allreduce(std::vector<at::Tensor>& tensors, const ::c10d::AllreduceOptions& how) {
  return queue(::c10d::OpType::ALLREDUCE, {}, tensors,
               [how](auto& gloo, auto&, auto& to) { return gloo.allreduce(to, how); });
}

HostNccl::WorkPtr HostNccl::broadcast(std::vector<at::Tensor>& tensors, const ::c10d::BroadcastOptions& how) {
  return queue(::c10d::OpType::BROADCAST, {}, tensors,
               [how](auto& gloo, auto&, auto& to) { return gloo.broadcast(to, how); });
}

HostNccl::WorkPtr HostNccl::allgather(std::vector<std::vector<at::Tensor>>& to, std::vector<at::Tensor>& from,
                                      const ::c10d::AllgatherOptions& how) {
  return queue(::c10d::OpType::ALLGATHER, from, to.at(0), [how](auto& gloo, auto& sources, auto& results) {
    std::vector<std::vector<at::Tensor>> lists{results};
    return gloo.allgather(lists, sources, how);
  });
}

HostNccl::WorkPtr HostNccl::_allgather_base(at::Tensor& to, at::Tensor& from, const ::c10d::AllgatherOptions& how) {
  return queue(::c10d::OpType::_ALLGATHER_BASE, {from}, {to}, [how](auto& gloo, auto& sources, auto& results) {
    return gloo._allgather_base(results[0], sources[0], how);
  });
}

HostNccl::WorkPtr HostNccl::alltoall_base(at::Tensor& to, at::Tensor& from, std::vector<int64_t>& received,
                                          std::vector<int64_t>& sent, const ::c10d::AllToAllOptions& how) {
  return queue(::c10d::OpType::ALLTOALL_BASE, {from}, {to},
               [how, received, sent](auto& gloo, auto& sources, auto& results) mutable {
                 return gloo.alltoall_base(results[0], sources[0], received, sent, how);
               });
}

HostNccl::WorkPtr HostNccl::barrier(const ::c10d::BarrierOptions&) {
  std::vector<at::Tensor> token{at::zeros({1}, at::TensorOptions().device(kCuda, get_device()))};
  return allreduce(token, {});
}

}  // namespace software_torch
