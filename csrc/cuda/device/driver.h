// The CUDA driver's entry point, found at run time: a program that contains this links without libcuda, and runs on a
// machine without a driver until it needs CUDA and gets an error.
//
// Ownership: none. Thread-safety: any thread. Failure: InvalidUsage that says what is missing and what to do.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "base/error.h"

namespace syncengine::cuda {

// cuStreamBatchMemOp, looked up once. Throws InvalidUsage if there is no driver, no device, or a driver older than this
// build's CUDA.
using StreamBatchMemOp = CUresult(CUstream, unsigned int, CUstreamBatchMemOpParams*, unsigned int);
StreamBatchMemOp* stream_batch_mem_op();

// Steps of a batch. In the first the stream puts `value` into a word of pinned or device memory; in the second it waits
// until kArrived is set in the word.
CUstreamBatchMemOpParams write_word(const uint32_t* word, uint32_t value);
CUstreamBatchMemOpParams wait_for_word(const uint32_t* word);

// Throws InvalidUsage, naming `what` and CUDA's own message.
void check(cudaError_t status, const char* what);
inline void check(CUresult status, const char* what) { check(static_cast<cudaError_t>(status), what); }  // same numbers

}  // namespace syncengine::cuda
