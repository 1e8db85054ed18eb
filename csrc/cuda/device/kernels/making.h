// The parts that kernels of any dtype share, for the files that compile them. Blocks are few, so each may use all
// registers of a multiprocessor, which hold what a thread loads at once.
#pragma once

#include <type_traits>

#include "cuda/device/kernels/kernels.h"

namespace syncengine::cuda {

namespace {

template <class Element, class Op, kernels::Rounding kRounding, int kSources>
__global__ void __launch_bounds__(kThreads, 1) reduce_kernel(const __grid_constant__ ReduceArgs args) {
  const size_t thread = static_cast<size_t>(blockIdx.x) * kThreads + threadIdx.x;
  const size_t threads = static_cast<size_t>(gridDim.x) * kThreads;
  if (!enter(args.gate)) return poison_share(args, sizeof(typename Element::Stored), thread, threads);
  reduce_share<Element, Op, kRounding, kSources>(args, thread, threads);
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

// Waits for the peer's mark. Returns false if the peer called something else, or if the watchdog has ended the wait.
__device__ bool wait_for(const BlockMeeting& meeting, int peer) {
  Control& control = *meeting.args.control;
  bool good = true;
  unsigned looks = 0;
  for (;; ++looks) {
    const MarkState arrival = meeting.look_for(peer);
    good = arrival != MarkState::Bad;
    if (arrival != MarkState::NotYet) break;
    if (looks % kAbortEvery == kAbortEvery - 1) {
      if (get_word(&control.aborted)) {
        good = false;
        break;
      }
      __nanosleep(0);  // lets the block's other threads look for their peers
    }
    if (looks % kLongWait == kLongWait - 1) {  // again and again: another block may have ended its wait for this peer
      set_word(&control.waiting, kInKernel);
      set_word(&control.late[peer], 1);
    }
  }
  if (looks >= kLongWait) {
    set_word(&control.late[peer], 0);
    set_word(&control.waiting, 0);
  }
  return good;
}

// Tells the peers that what this block's threads have written is there, and waits for what theirs write. All threads
// return the same: false if a peer called something else, or never comes.
__device__ bool meet(const BlockMeeting& meeting) {
  __syncthreads();
  bool bad = false;
  if (threadIdx.x < meeting.args.world && threadIdx.x != meeting.args.rank) {
    __threadfence_system();  // the other threads' bytes come before the mark
    meeting.tell(threadIdx.x);
    bad = !wait_for(meeting, threadIdx.x);
  }
  return !__syncthreads_or(bad);
}

// All-reduces the block's part of the tensor. Returns false if the output gets no result.
template <class Element, int kSources>
__device__ __forceinline__ bool reduce_part(const InKernelArgs& args, ByteRun part) {
  constexpr size_t kElement = sizeof(typename Element::Stored);
  const int block = blockIdx.x;
  InKernelArea& own = *args.areas[args.rank];
  const uint32_t call = own.calls[block] + 1, half = call & 1;
  if (has_failed(own, call)) return false;
  copy_run(own.slots[half] + part.begin, static_cast<const unsigned char*>(args.input) + part.begin, part.bytes,
           threadIdx.x, kThreads);
  bool open = meet({args, block, 0, call});
  count_call(own, block, gridDim.x, threadIdx.x, call);  // every thread has read the call before it
  if (open) {
    const ByteRun run = args.shots == 1 ? part : piece_of(part, args.rank, args.world);
    const SlotsReduction slice{args, half, run.begin, run.bytes / kElement};
    reduce_share<Element, kernels::SumElement, kernels::Rounding::Once, kSources>(slice, threadIdx.x, kThreads);
    if (args.shots == 2 && (open = meet({args, block, 1, call}))) take_slices(args, part, half, threadIdx.x, kThreads);
  }
  if (!open && threadIdx.x == 0) note_failure(own, call);
  return open;
}

template <class Element, int kSources>
__global__ void __launch_bounds__(kThreads, 1) in_kernel(const __grid_constant__ InKernelArgs args) {
  const ByteRun part = piece_of({0, args.bytes}, blockIdx.x, gridDim.x);
  const bool good = reduce_part<Element, kSources>(args, part);
  if (blockIdx.x == 0 && threadIdx.x == 0) count_progress(*args.control);
  if (!good) poison_bytes(static_cast<unsigned char*>(args.output) + part.begin, part.bytes, threadIdx.x, kThreads);
}

}  // namespace

template <class Element>
Kernels KernelsOf<Element>::find(ReduceOp op, kernels::Rounding rounding, int sources) {
  Kernels found;
  visit_element<Element>(op, rounding, sources, [&]<class E, class Op, kernels::Rounding kRounding, int kSources>() {
    found.reduce = reduce_kernel<E, Op, kRounding, kSources>;
    if constexpr (E::kFloating && std::is_same_v<Op, kernels::SumElement>) {
      found.note = note_kernel<E, kRounding>;
      if constexpr (kRounding == kernels::Rounding::Once) found.in_kernel = in_kernel<E, kSources>;
    }
  });
  return found;
}

}  // namespace syncengine::cuda
