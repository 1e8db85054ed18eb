#include <algorithm>

#include "cuda/device/kernels/kernels.h"
#include "cuda/device/stream.h"

namespace syncengine::cuda {

namespace {

constexpr int kBlocks = 16;  // the rest of the device is the model's

// Copies pieces of memory, each by one row of blocks.
__global__ void __launch_bounds__(kThreads, 1) copy_kernel(const __grid_constant__ CopyArgs args) {
  const size_t thread = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x;
  const size_t threads = static_cast<size_t>(gridDim.x) * kThreads;
  const bool open = enter(args.gate);
  const int piece = blockIdx.y;
  if (piece >= args.pieces) return;
  if (!open) return poison_bytes(args.destinations[piece], args.bytes[piece], thread, threads);
  copy_run(args.destinations[piece], args.sources[piece], args.bytes[piece], thread, threads);
}

Kernels find(const kernels::Reduction& reduction, int sources) {
  Kernels found;
  visit_dtype(reduction.dtype, [&]<class Element>(Element) {
    found = KernelsOf<Element>::find(reduction.op, reduction.rounding, sources);
  });
  return found;
}

// Returns how many blocks give each thread 16 bytes, but at least one, and not more than `most`.
int blocks_for(size_t bytes, int most) {
  const size_t wanted = (bytes + kThreads * sizeof(Pack) - 1) / (kThreads * sizeof(Pack));
  return static_cast<int>(std::clamp<size_t>(wanted, 1, std::max(most, 1)));
}

// Launches without <<<>>>, so that tests/cuda/software can compile this file as C++.
template <class Args>
void launch(void (*kernel)(Args), dim3 grid, const Args& args, cudaStream_t stream, const char* what) {
  void* arguments[] = {const_cast<Args*>(&args)};
  check(cudaLaunchKernel(kernel, grid, dim3(kThreads), arguments, 0, stream), what);
}

}  // namespace

void load_kernels() {
  auto load = [](auto kernel) {
    cudaFuncAttributes attributes;
    if (kernel) check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), "loading a kernel");
  };
  for (DType dtype : {DType::Float16, DType::BFloat16, DType::Float32, DType::Float64, DType::Int8, DType::Int16,
                      DType::Int32, DType::Int64, DType::UInt8})
    for (ReduceOp op : {ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max})
      for (auto rounding : {kernels::Rounding::Once, kernels::Rounding::EveryHop})
        for (int sources : {1, 2, 4, 8}) {
          const Kernels found = find({dtype, op, rounding}, sources);
          load(found.reduce);
          load(found.in_kernel);
          load(found.note);
        }
  load(copy_kernel);
}

void StreamSteps::reduce(const kernels::Reduction& reduction, const ReduceArgs& args) {
  const dim3 grid = blocks_for(args.count * element_size(reduction.dtype), kBlocks);
  launch(find(reduction, args.source_count).reduce, grid, args, stream_, "launching a reduction");
}

void StreamSteps::note(const kernels::Reduction& reduction, const NoteArgs& args) {
  const dim3 grid = blocks_for(args.sum.count * element_size(reduction.dtype), kBlocks);
  launch(find(reduction, args.sum.source_count).note, grid, args, stream_, "launching a look at what is finite");
}

void StreamSteps::in_kernel(const kernels::Reduction& reduction, const InKernelArgs& args) {
  const dim3 grid = blocks_for(args.bytes, kInKernelBlocks);  // the same on all ranks: the fingerprint has the bytes
  launch(find(reduction, args.world).in_kernel, grid, args, stream_, "launching a reduction that waits");
}

void StreamSteps::copy(const CopyArgs& args) {
  const int rows = std::max(args.pieces, 1);
  const dim3 grid(blocks_for(*std::max_element(args.bytes, args.bytes + rows), kBlocks / rows), rows);
  launch(copy_kernel, grid, args, stream_, "launching a copy");
}

}  // namespace syncengine::cuda
