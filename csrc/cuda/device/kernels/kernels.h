// A dtype's kernels. Files beside this one compile them, those of each floating dtype alone, since a compiler takes
// minutes for all of them.
//
// Ownership: none. Thread-safety: reentrant. Failure: as in body.h.
#pragma once

#include "cuda/in_kernel.h"

namespace syncengine::cuda {

inline constexpr int kThreads = 512;  // in each block

// The kernels of one op. A null pointer says that the op has no such kernel; the comments say which ops have one.
struct Kernels {
  void (*reduce)(ReduceArgs) = nullptr;
  void (*in_kernel)(InKernelArgs) = nullptr;  // sums of floating dtypes, rounded once
  void (*note)(NoteArgs) = nullptr;           // sums of floating dtypes
};

template <class Element>
struct KernelsOf {
  static Kernels find(ReduceOp op, kernels::Rounding rounding, int sources);
};

// Whether the gate is open; all threads of a block call this and get one answer. Block 0 increments Control::progress.
__device__ __forceinline__ bool enter(const Gate& gate) {
  if (!gate.words) return true;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) count_progress(*gate.control);
  const bool shut = threadIdx.x < gate.world && is_shut(gate, threadIdx.x);
  return !__syncthreads_or(shut);
}

}  // namespace syncengine::cuda
