// Steps on a CUDA stream: the kernels whose bodies are in cuda/body.h and cuda/in_kernel.h, and exchanges, which are
// memory operations of the stream, so that waiting holds no multiprocessor and needs no host.
//
// Ownership: none; arguments are copied into the launch. Thread-safety: one thread at a time, on the current device.
// Failure: InvalidUsage with CUDA's own words for what the device refuses.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "cuda/sequence.h"

namespace syncengine::cuda {

// Makes the current device load every kernel, once a device. Otherwise the first launch of a kernel may synchronize the
// device, and so wait for streams that wait for peers.
void load_kernels();

class StreamSteps final : public Steps {
 public:
  // For kernels alone, of at most `blocks` blocks.
  StreamSteps(cudaStream_t stream, int blocks) : stream_(stream), blocks_(blocks) {}
  // `controls` has each rank's words, at the device's addresses.
  StreamSteps(cudaStream_t stream, int blocks, int rank, const std::vector<Control*>& controls)
      : stream_(stream), blocks_(blocks), rank_(rank), controls_(&controls) {}

  void exchange(const WordExchange& exchange) override;
  void reduce(const kernels::Reduction& reduction, const ReduceArgs& args) override;
  void note(const kernels::Reduction& reduction, const NoteArgs& args) override;
  void copy(const CopyArgs& args) override;
  void in_kernel(const kernels::Reduction& reduction, const InKernelArgs& args) override;

 private:
  cudaStream_t stream_;
  int blocks_, rank_ = 0;
  const std::vector<Control*>* controls_ = nullptr;
};

}  // namespace syncengine::cuda
