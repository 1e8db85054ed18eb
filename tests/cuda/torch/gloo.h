// A backend for CUDA tensors over a Gloo backend for the host's. Thread-safety and failure: Gloo's. Each call waits.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <string>
#include <vector>

namespace software_torch {

class HostGloo final : public ::c10d::Backend {
 public:
  explicit HostGloo(c10::intrusive_ptr<::c10d::Backend> gloo);
  const std::string getBackendName() const override { return "gloo"; }

  c10::intrusive_ptr<::c10d::Work> allreduce(std::vector<at::Tensor>&, const ::c10d::AllreduceOptions&) override;
  c10::intrusive_ptr<::c10d::Work> broadcast(std::vector<at::Tensor>&, const ::c10d::BroadcastOptions&) override;
  c10::intrusive_ptr<::c10d::Work> allgather(std::vector<std::vector<at::Tensor>>&, std::vector<at::Tensor>&,
                                             const ::c10d::AllgatherOptions&) override;
  c10::intrusive_ptr<::c10d::Work> _allgather_base(at::Tensor&, at::Tensor&, const ::c10d::AllgatherOptions&) override;
  c10::intrusive_ptr<::c10d::Work> barrier(const ::c10d::BarrierOptions&) override;

 private:
  c10::intrusive_ptr<::c10d::Backend> gloo_;
};

}  // namespace software_torch
