// Launches of the kernels whose bodies are in cuda/body.h and cuda/one_shot.h.
//
// Ownership: none; arguments are copied into the launch. Thread-safety: any thread, on the current device.
// Failure: InvalidUsage with CUDA's own words for a launch that the device refuses.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/one_shot.h"

namespace syncengine::cuda {

// Makes the current device load every kernel, once a device: the first launch of a kernel may otherwise synchronize the
// device, and wait for streams that wait for peers.
void load_kernels();

// With at most `blocks` blocks.
void launch_reduce(const kernels::Reduction& reduction, const ReduceArgs& args, int blocks, cudaStream_t stream);
void launch_one_shot(const kernels::Reduction& reduction, const OneShotArgs& args, cudaStream_t stream);
void launch_copy(const CopyArgs& args, int blocks, cudaStream_t stream);

}  // namespace syncengine::cuda
