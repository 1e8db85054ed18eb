// A dtype's kernels. Each dtype has a file of its own beside this one, since a compiler takes minutes for all of them.
//
// Ownership: none. Thread-safety: reentrant. Failure: as in body.h.
#pragma once

#include "cuda/in_kernel.h"
#include "cuda/kernel_choice.h"

namespace syncengine::cuda {

inline constexpr int kThreads = 512;  // in each block

// The kernels of one op. A null pointer says that the op has no such kernel; the comments say which ops have one.
struct Kernels {
  void (*reduce)(ReduceArgs) = nullptr;
  void (*in_kernel)(InKernelArgs) = nullptr;  // sums of floating dtypes, rounded once
  void (*note)(NoteArgs) = nullptr;           // sums of floating dtypes
};

// Each instance is compiled in a file of its own.
template <class Element>
struct KernelsOf {
  static Kernels find(ReduceOp op, kernels::Rounding rounding, int sources);
};

using CopyKernel = void (*)(CopyArgs);
CopyKernel copy_kernel();

}  // namespace syncengine::cuda
