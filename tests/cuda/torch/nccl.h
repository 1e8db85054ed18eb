// A backend for CUDA tensors that behaves as NCCL's: it queues on a stream of its own, waits for nobody on the host,
// holds its stream where a peer has died until abort(). A Gloo backend for the host's tensors moves the bytes, when the
// stream is there. Thread-safety: one thread at a time, but for abort().
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "machine.h"

namespace software_torch {

class HostNccl final : public ::c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<::c10d::Work>;

  explicit HostNccl(c10::intrusive_ptr<::c10d::Backend> gloo);
  const std::string getBackendName() const override { return "nccl"; }
  void setSequenceNumberForGroup() override {}

  WorkPtr allreduce(std::vector<at::Tensor>&, const ::c10d::AllreduceOptions&) override;
  WorkPtr broadcast(std::vector<at::Tensor>&, const ::c10d::BroadcastOptions&) override;
  WorkPtr allgather(std::vector<std::vector<at::Tensor>>&, std::vector<at::Tensor>&,
                    const ::c10d::AllgatherOptions&) override;
  WorkPtr _allgather_base(at::Tensor&, at::Tensor&, const ::c10d::AllgatherOptions&) override;
  WorkPtr alltoall_base(at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&,
                        const ::c10d::AllToAllOptions&) override;
  WorkPtr barrier(const ::c10d::BarrierOptions&) override;
  void abort() override;
  void shutdown() override {}

 private:
  struct State;
  // Of the host's copies of all inputs and outputs.
  using Call =
      std::function<WorkPtr(::c10d::Backend& gloo, std::vector<at::Tensor>& from, std::vector<at::Tensor>& to)>;
  WorkPtr queue(::c10d::OpType type, const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to, Call call);

  std::shared_ptr<State> state_;
  std::optional<c10::Stream> stream_;
};

}  // namespace software_torch
