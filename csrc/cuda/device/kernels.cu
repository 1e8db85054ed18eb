#include <algorithm>
#include <vector>

#include "cuda/device/driver.h"
#include "cuda/device/stream_steps.h"
#include "cuda/kernel_choice.h"

namespace syncengine::cuda {

namespace {

constexpr int kThreads = 512;

// Each block asks for itself, once, whether the gate is open; block 0 counts. All threads return the same.
__device__ __forceinline__ bool enter(const Gate& gate) {
  if (!gate.words) return true;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) count_progress(*gate.control);
  const bool shut = threadIdx.x < gate.world && is_shut(gate, threadIdx.x);
  return !__syncthreads_or(shut);
}

template <class Element, class Op, kernels::Rounding kRounding, int kSources>
__global__ void __launch_bounds__(kThreads) reduce_kernel(const __grid_constant__ ReduceArgs args) {
  const size_t thread = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x;
  const size_t threads = static_cast<size_t>(gridDim.x) * kThreads;
  if (enter(args.gate)) {
    reduce_share<Element, Op, kRounding, kSources>(args, thread, threads);
  } else {
    poison_share(args, sizeof(typename Element::Stored), thread, threads);
  }
}

// One row of blocks a piece.
__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ CopyArgs args) {
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

// Some thousand looks are some milliseconds: then the watchdog is to know for whom.
constexpr unsigned kLongWait = 1u << 14;
constexpr unsigned kAbortEvery = 64;  // looks; the abort word lies beyond the bus

// False if the peer called something else, or never comes.
__device__ bool wait_for(const OneShotArgs& args, int peer, int block, uint32_t epoch) {
  bool good = true;
  unsigned looks = 0;
  for (;; ++looks) {
    const Arrival arrival = look_for(args, peer, block, epoch);
    good = arrival != Arrival::Bad;
    if (arrival != Arrival::NotYet) break;
    if (looks % kAbortEvery == kAbortEvery - 1) {
      if (get_word(&args.control->aborted)) {
        good = false;
        break;
      }
      __nanosleep(0);  // the block's other threads have peers to look for, too
    }
    if (block == 0 && looks == kLongWait) {
      set_word(&args.control->waiting, kInKernel);
      set_word(&args.control->late[peer], 1);
    }
  }
  if (block == 0 && looks >= kLongWait) set_word(&args.control->late[peer], 0);
  return good;
}

template <class Element, class Op, kernels::Rounding kRounding, int kSources>
__global__ void __launch_bounds__(kThreads) one_shot_kernel(const __grid_constant__ OneShotArgs args) {
  const int block = blockIdx.x;
  const size_t part = one_shot_part(args.bytes, gridDim.x);
  const size_t begin = min(args.bytes, part * block), length = min(args.bytes, begin + part) - begin;
  OneShotArea& own = *args.areas[args.rank];
  const uint32_t epoch = own.epochs[block] + 1;
  copy_run(own.slots[epoch & 1] + begin, static_cast<const unsigned char*>(args.input) + begin, length, threadIdx.x,
           kThreads);
  __syncthreads();  // all has been staged, and every thread knows the epoch
  count_epoch(own, block, gridDim.x, threadIdx.x, epoch);
  bool bad = false;
  if (threadIdx.x < args.world && threadIdx.x != args.rank) {
    const int peer = threadIdx.x;
    __threadfence_system();  // what the other threads staged comes before the mark
    put_mark(&args.areas[peer]->marks[epoch & 1][block][args.rank],
             static_cast<uint64_t>(epoch) << 32 | args.fingerprint);
    bad = !wait_for(args, peer, block, epoch);
  }
  const bool open = !__syncthreads_or(bad);
  if (block == 0 && threadIdx.x == 0) {
    set_word(&args.control->waiting, 0);
    count_progress(*args.control);
  }
  constexpr size_t kElement = sizeof(typename Element::Stored);
  OneShotPart part_of_all{args, epoch & 1, begin, length / kElement};
  part_of_all.notes.first += begin / kElement;
  if (open) {
    reduce_share<Element, Op, kRounding, kSources>(part_of_all, threadIdx.x, kThreads);
  } else {
    poison_share(part_of_all, sizeof(typename Element::Stored), threadIdx.x, kThreads);
  }
}

// Those of an op; small messages know one rounding.
struct Found {
  void (*reduce)(ReduceArgs) = nullptr;
  void (*one_shot)(OneShotArgs) = nullptr;
};

Found find(const kernels::Reduction& reduction, int sources) {
  Found found;
  visit_instance(reduction.dtype, reduction.op, reduction.rounding, sources, [&](auto instance) {
    using I = decltype(instance);
    found.reduce = reduce_kernel<typename I::Element, typename I::Op, I::kRounding, I::kSources>;
    if constexpr (I::kRounding == kernels::Rounding::Once)
      found.one_shot = one_shot_kernel<typename I::Element, typename I::Op, I::kRounding, I::kSources>;
  });
  return found;
}

// As many blocks as have 16 bytes for each thread, at least one.
int blocks_for(size_t bytes, int most) {
  const size_t wanted = (bytes + kThreads * sizeof(Pack) - 1) / (kThreads * sizeof(Pack));
  return static_cast<int>(std::clamp<size_t>(wanted, 1, std::max(most, 1)));
}

// Not by <<<>>>, so that this file is C++ to a compiler that gives it CUDA's words (tests/cuda/software).
template <class Args>
void launch(void (*kernel)(Args), dim3 grid, const Args& args, cudaStream_t stream, const char* what) {
  void* arguments[] = {const_cast<Args*>(&args)};
  check(cudaLaunchKernel(kernel, grid, dim3(kThreads), arguments, 0, stream), what);
}

}  // namespace

void load_kernels() {
  auto load = [](auto kernel) {
    cudaFuncAttributes attributes;
    check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)), "loading a kernel");
  };
  for (DType dtype : {DType::Float16, DType::BFloat16, DType::Float32, DType::Float64, DType::Int8, DType::Int16,
                      DType::Int32, DType::Int64, DType::UInt8})
    for (ReduceOp op : {ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max})
      for (auto rounding : {kernels::Rounding::Once, kernels::Rounding::EveryHop})
        for (int sources : {1, 2, 4, 8}) {
          const Found found = find({dtype, op, rounding}, sources);
          load(found.reduce);
          if (found.one_shot) load(found.one_shot);
        }
  load(copy_kernel);
}

void StreamSteps::reduce(const kernels::Reduction& reduction, const ReduceArgs& args) {
  const dim3 grid = blocks_for(args.count * element_size(reduction.dtype), blocks_);
  launch(find(reduction, args.source_count).reduce, grid, args, stream_, "launching a reduction");
}

void StreamSteps::one_shot(const kernels::Reduction& reduction, const OneShotArgs& args) {
  const dim3 grid = blocks_for(args.bytes, kOneShotBlocks);  // the same on all ranks: the fingerprint has the bytes
  launch(find(reduction, args.world).one_shot, grid, args, stream_, "launching a small reduction");
}

void StreamSteps::copy(const CopyArgs& args) {
  size_t most = 0;
  for (int piece = 0; piece < args.pieces; ++piece) most = std::max(most, args.bytes[piece]);
  const int rows = std::max(args.pieces, 1);
  const dim3 grid(blocks_for(most, blocks_ / rows), rows);
  launch(copy_kernel, grid, args, stream_, "launching a copy");
}

}  // namespace syncengine::cuda
