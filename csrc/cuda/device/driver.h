// The CUDA driver's entry points, found at run time: a program that contains this links without libcuda, and runs on a
// machine without a driver until it needs CUDA and gets an error.
//
// Ownership: none. Thread-safety: any thread. Failure: InvalidUsage that says what is missing and what to do.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "base/error.h"

namespace syncengine::cuda {

struct CudaDriver {
  CUresult (*stream_batch_mem_op)(CUstream, unsigned int, CUstreamBatchMemOpParams*, unsigned int);
  CUresult (*get_error_name)(CUresult, const char**);
};

// Looked up once. Throws InvalidUsage if there is no driver, no device, or a driver older than this build's CUDA.
const CudaDriver& driver();

// Steps of a batch. In the first the stream puts `value` into a word of pinned or device memory; in the second it waits
// until kArrived is set in the word.
CUstreamBatchMemOpParams write_word(const uint32_t* word, uint32_t value);
CUstreamBatchMemOpParams wait_for_word(const uint32_t* word);

// Throws InvalidUsage, naming `what` and CUDA's own message.
void check(cudaError_t status, const char* what);
void check(CUresult status, const char* what);

}  // namespace syncengine::cuda
