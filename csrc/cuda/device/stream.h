// Steps on a CUDA stream: the kernels whose bodies are in cuda/body.h and cuda/in_kernel.h, and exchanges, which are
// memory operations of the stream, so that waiting holds no multiprocessor and needs no host.
//
// The driver's entry point for these operations is found at run time: a program that contains this links without
// libcuda, and runs on a machine without a driver until it needs CUDA and gets an error.
//
// Ownership: none; arguments are copied into the launch. Thread-safety: any thread; of a StreamSteps one at a time, on
// the current device. Failure: InvalidUsage that says what is missing and what to do, or with CUDA's own words for what
// the device refuses.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <vector>

#include "base/error.h"
#include "cuda/sequence.h"

namespace syncengine::cuda {

// cuStreamBatchMemOp, looked up once. Throws InvalidUsage if there is no driver, no device, or a driver older than this
// build's CUDA.
using StreamBatchMemOp = CUresult(CUstream, unsigned int, CUstreamBatchMemOpParams*, unsigned int);
StreamBatchMemOp* stream_batch_mem_op();

// Make operations for a batch of cuStreamBatchMemOp. By write_word() the stream puts `value` into a word of pinned or
// device memory; by wait_for_word() it waits until kArrived is set in the word.
CUstreamBatchMemOpParams write_word(const uint32_t* word, uint32_t value);
CUstreamBatchMemOpParams wait_for_word(const uint32_t* word);

// Throws InvalidUsage, naming `what` and CUDA's own message.
void check(cudaError_t status, const char* what);
inline void check(CUresult status, const char* what) { check(static_cast<cudaError_t>(status), what); }  // same numbers

// Makes the current device load every kernel that it has not loaded. Otherwise the first launch of a kernel may
// synchronize the device, and so wait for streams that wait for peers.
void load_kernels();

class StreamSteps final : public Steps {
 public:
  // `controls` has each rank's words, at the device's addresses. Only exchange() needs them.
  explicit StreamSteps(cudaStream_t stream, int rank = 0, const std::vector<Control*>* controls = nullptr)
      : stream_(stream), rank_(rank), controls_(controls) {}

  void exchange(const WordExchange& exchange) override;
  void reduce(const kernels::Reduction& reduction, const ReduceArgs& args) override;
  void note(const kernels::Reduction& reduction, const NoteArgs& args) override;
  void copy(const CopyArgs& args) override;
  void in_kernel(const kernels::Reduction& reduction, const InKernelArgs& args) override;

 private:
  cudaStream_t stream_;
  int rank_;
  const std::vector<Control*>* controls_;
};

}  // namespace syncengine::cuda
