// All-reduce by one kernel, a sum of a floating dtype, whose blocks wait for the peers themselves: exchanges by a
// stream cost more than moving so few bytes. A peer that is late holds the blocks' multiprocessors meanwhile.
//
// Each block has a part of the tensor. A block stages its part, tells the peers' same block, and waits for theirs. Few
// bytes take one shot: every rank reduces all of the part. More bytes take two: every rank reduces a slice of the part,
// puts the slice into its slot, too, tells the peers again, and takes the other slices from their slots. The kernel
// looks at the abort word while it waits.
//
// The kernel counts calls in device memory, so a replayed graph goes on where the last call was. Slots and marks take
// turns: a peer writes those of call c + 2 only after this rank's first mark of c + 1, which this rank writes when it
// is done with c. Each call gives a block another part of the slots, so all blocks must count the same calls, even
// those that a small call does without. Behind a call that has failed this rank writes no slot and no mark any more: it
// does not wait, and a peer may still read what it has staged.
//
// Ownership: none. Aliasing: input and output are the same or do not overlap. Failure: as in body.h.
#pragma once

#include "cuda/body.h"

namespace syncengine::cuda {

inline constexpr int kInKernelBlocks = 16;
// The most bytes that one shot and two shots take. Neither has been tuned on a GPU.
inline constexpr size_t kOneShotBytes = 128 << 10;
inline constexpr size_t kTwoShotBytes = 8 << 20;

// Device memory that all peers reach. All but the slots is zero at first.
struct InKernelArea {
  // By call (modulo 2), shot and block, the mark of each peer: call << 32 | fingerprint.
  alignas(64) uint64_t marks[2][2][kInKernelBlocks][kMaxRanks];
  // By block, the number of calls so far; and the first call that has failed, or 0. This rank's kernels write both.
  alignas(64) uint32_t calls[kInKernelBlocks];
  uint32_t failed;
  // By call (modulo 2): this rank's input, and later, over it, the results of its slice.
  alignas(64) unsigned char slots[2][kTwoShotBytes];
};

struct InKernelArgs {
  InKernelArea* areas[kMaxRanks];
  Control* control;
  const void* input;
  void* output;
  size_t bytes;
  double scale;
  uint32_t fingerprint;
  int rank, world;
  int shots;  // 1 or 2, the same on all ranks
};

// A run of the tensor's bytes.
struct ByteRun {
  size_t begin, bytes;
};

// One of `pieces` pieces of `whole`, the same on all ranks however tensors are aligned. The last ones may be empty.
SYNCENGINE_BOTH ByteRun piece_of(ByteRun whole, int index, int pieces) {
  const size_t piece = ((whole.bytes + pieces - 1) / pieces + 15) / 16 * 16;
  const size_t begin = piece * index < whole.bytes ? piece * index : whole.bytes;
  return {whole.begin + begin, piece < whole.bytes - begin ? piece : whole.bytes - begin};
}

// Notes that the block is in `call`; called by each thread of it. Block 0 counts for the blocks that this call lacks.
SYNCENGINE_BOTH void count_call(InKernelArea& area, int block, int blocks, int thread, uint32_t call) {
  if (thread == 0) area.calls[block] = call;
  if (block == 0 && thread >= blocks && thread < kInKernelBlocks) area.calls[thread] = call;
}

// Whether an earlier call of this rank has failed. All threads of a block get the same answer.
SYNCENGINE_BOTH bool has_failed(const InKernelArea& area, uint32_t call) {
  return area.failed != 0 && area.failed != call;
}
SYNCENGINE_BOTH void note_failure(InKernelArea& area, uint32_t call) {
  if (area.failed == 0) area.failed = call;
}

// Write and read a mark, on the device or in threads that stand in for it in tests.
SYNCENGINE_BOTH void put_mark(uint64_t* mark, uint64_t value) {
#ifdef __CUDA_ARCH__
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(mark), "l"(value) : "memory");
#else
  __atomic_store_n(mark, value, __ATOMIC_RELEASE);
#endif
}
SYNCENGINE_BOTH uint64_t get_mark(const uint64_t* mark) {
#ifdef __CUDA_ARCH__
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(mark) : "memory");
  return value;
#else
  return __atomic_load_n(mark, __ATOMIC_ACQUIRE);
#endif
}

enum class MarkState : uint8_t { NotYet, Here, Bad };

// A block's meeting with the peers' same block, after it has staged its part (shot 0) or reduced its slice (shot 1).
struct BlockMeeting {
  const InKernelArgs& args;
  int block, shot;
  uint32_t call;

  SYNCENGINE_BOTH void tell(int peer) const {
    put_mark(&args.areas[peer]->marks[call & 1][shot][block][args.rank],
             static_cast<uint64_t>(call) << 32 | args.fingerprint);
  }

  // Whether the peer's mark is there, and whether it is the expected one.
  SYNCENGINE_BOTH MarkState look_for(int peer) const {
    const uint64_t mark = get_mark(&args.areas[args.rank]->marks[call & 1][shot][block][peer]);
    if (static_cast<uint32_t>(mark >> 32) != call) return MarkState::NotYet;
    if (static_cast<uint32_t>(mark) == args.fingerprint) return MarkState::Here;
    tell_mismatch(*args.control, peer, static_cast<uint32_t>(mark), args.fingerprint);
    return MarkState::Bad;
  }
};

// Describes the reduction of a run of the slots, in place of ReduceArgs, whose lists on every thread's stack would cost
// hundreds of megabytes of the device, and make it finish all its work before the first such kernel starts.
struct SlotsReduction {
  const InKernelArgs& call;
  uint32_t half;  // which of the two halves of the slots
  size_t begin;   // bytes
  size_t count;   // elements
  int source_count = call.world, destination_count = call.shots;
  double scale = call.scale;
};

template <class Stored>
SYNCENGINE_BOTH const Stored* in(const SlotsReduction& part, int s) {
  return reinterpret_cast<const Stored*>(part.call.areas[s]->slots[part.half] + part.begin);
}
template <class Stored>
SYNCENGINE_BOTH Stored* out(const SlotsReduction& part, int d) {
  auto* base =
      d == 0 ? static_cast<unsigned char*>(part.call.output) : part.call.areas[part.call.rank]->slots[part.half];
  return reinterpret_cast<Stored*>(base + part.begin);
}

// Copies this thread's share of the slices that all ranks have reduced, this rank's among them, to the output.
SYNCENGINE_BOTH void take_slices(const InKernelArgs& args, ByteRun part, uint32_t half, size_t thread, size_t threads) {
  const auto slice = static_cast<uint32_t>(piece_of(part, 0, args.world).bytes);  // the last ones may be smaller
  auto from = [&](size_t at) { return args.areas[static_cast<uint32_t>(at) / slice]->slots[half] + part.begin + at; };
  copy_from(static_cast<unsigned char*>(args.output) + part.begin, from, part.bytes, thread, threads);
}

}  // namespace syncengine::cuda
