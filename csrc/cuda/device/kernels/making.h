// The parts that kernels of any dtype share, for the files that compile them. Blocks are few, so each may use all
// registers of a multiprocessor, which hold what a thread loads at once.
#pragma once

#include <type_traits>

#include "cuda/device/kernels/kernels.h"

namespace syncengine::cuda {

namespace {

// Whether the gate is open. Each block finds that out itself, once, and all its threads return the same; block 0 counts
// progress.
__device__ __forceinline__ bool enter(const Gate& gate) {
  if (!gate.words) return true;
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) count_progress(*gate.control);
  const bool shut = threadIdx.x < gate.world && is_shut(gate, threadIdx.x);
  return !__syncthreads_or(shut);
}

template <class Element, class Op, kernels::Rounding kRounding, int kSources>
__global__ void __launch_bounds__(kThreads, 1) reduce_kernel(const __grid_constant__ ReduceArgs args) {
  const size_t thread = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x;
  const size_t threads = static_cast<size_t>(gridDim.x) * kThreads;
  if (enter(args.gate)) {
    reduce_share<Element, Op, kRounding, kSources>(args, thread, threads);
  } else {
    poison_share(args, sizeof(typename Element::Stored), thread, threads);
  }
}

template <class Element, kernels::Rounding kRounding>
__global__ void __launch_bounds__(kThreads, 1) note_kernel(const __grid_constant__ NoteArgs args) {
  if (!enter(args.sum.gate)) return;
  note_share<Element, kRounding>(args, static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x,
                                 static_cast<size_t>(gridDim.x) * kThreads);
}

// After this many looks at a mark, which take some milliseconds, the kernel tells the watchdog for which peer it waits.
constexpr unsigned kLongWait = 1u << 14;
constexpr unsigned kAbortEvery = 64;  // looks between two at the abort word, which lies beyond the bus

// Returns false if the peer called something else, or never comes.
__device__ bool wait_for(const OneShotArgs& args, int peer, int block, uint32_t epoch) {
  bool good = true;
  unsigned looks = 0;
  for (;; ++looks) {
    const MarkState arrival = look_for(args, peer, block, epoch);
    good = arrival != MarkState::Bad;
    if (arrival != MarkState::NotYet) break;
    if (looks % kAbortEvery == kAbortEvery - 1) {
      if (get_word(&args.control->aborted)) {
        good = false;
        break;
      }
      __nanosleep(0);  // lets the block's other threads look for their peers
    }
    if (block == 0 && looks == kLongWait) {
      set_word(&args.control->waiting, kInKernel);
      set_word(&args.control->late[peer], 1);
    }
  }
  if (block == 0 && looks >= kLongWait) set_word(&args.control->late[peer], 0);
  return good;
}

template <class Element, int kSources>
__global__ void __launch_bounds__(kThreads, 1) one_shot_kernel(const __grid_constant__ OneShotArgs args) {
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
    __threadfence_system();  // the other threads' staged bytes come before the mark
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
  const OneShotPart part_of_all{args, epoch & 1, begin, length / kElement};
  if (open) {
    reduce_share<Element, kernels::SumElement, kernels::Rounding::Once, kSources>(part_of_all, threadIdx.x, kThreads);
  } else {
    poison_share(part_of_all, kElement, threadIdx.x, kThreads);
  }
}

}  // namespace

template <class Element>
Kernels KernelsOf<Element>::find(ReduceOp op, kernels::Rounding rounding, int sources) {
  Kernels found;
  visit_element<Element>(op, rounding, sources, [&]<class E, class Op, kernels::Rounding kRounding, int kSources>() {
    found.reduce = reduce_kernel<E, Op, kRounding, kSources>;
    if constexpr (E::kFloating && std::is_same_v<Op, kernels::SumElement>) {
      found.note = note_kernel<E, kRounding>;
      if constexpr (kRounding == kernels::Rounding::Once) found.one_shot = one_shot_kernel<E, kSources>;
    }
  });
  return found;
}

}  // namespace syncengine::cuda
