#include "cuda/device/kernels/making.h"

namespace syncengine::cuda {

namespace {

// Copies pieces of memory, each by one row of blocks.
__global__ void __launch_bounds__(kThreads, 1) copy_pieces(const __grid_constant__ CopyArgs args) {
  const size_t thread = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x;
  const size_t threads = static_cast<size_t>(gridDim.x) * kThreads;
  const bool open = enter(args.gate);
  const int piece = blockIdx.y;
  if (piece >= args.pieces) return;
  if (open) {
    copy_run(args.destinations[piece], args.sources[piece], args.bytes[piece], thread, threads);
  } else {
    poison_bytes(args.destinations[piece], args.bytes[piece], thread, threads);
  }
}

}  // namespace

CopyKernel copy_kernel() { return copy_pieces; }

}  // namespace syncengine::cuda
