// All-reduce of few bytes by one kernel, a sum of a floating dtype: each block stages its part, tells the peers' same
// block, waits for theirs, and reduces all parts itself. The kernel itself waits, since a stream's wait costs more than
// such a message, and looks at the abort word meanwhile.
//
// The kernel counts epochs in device memory, so a replayed graph goes on where the last call was. Slots and marks take
// turns: a peer writes those of epoch e + 2 only after this rank's mark of e + 1, which this rank writes when it is
// done with e. Each call cuts the slots anew, so all blocks are always in the same epoch, including those that a small
// call does without.
//
// Ownership: none. Aliasing: input and output are the same or do not overlap. Failure: as in body.h.
#pragma once

#include "cuda/body.h"

namespace syncengine::cuda {

inline constexpr int kOneShotBlocks = 16;
inline constexpr size_t kOneShotBytes = 128 << 10;  // not yet tuned on a GPU

// Device memory that all peers reach, initially zero.
struct OneShotArea {
  alignas(64) uint64_t marks[2][kOneShotBlocks][kMaxRanks];  // written by each peer: epoch << 32 | fingerprint
  alignas(64) uint32_t epochs[kOneShotBlocks];               // of each block, written by this rank's kernels
  alignas(64) unsigned char slots[2][kOneShotBytes];         // this rank's input
};

struct OneShotArgs {
  OneShotArea* areas[kMaxRanks];
  Control* control;
  const void* input;
  void* output;
  size_t bytes;
  double scale;
  uint32_t fingerprint;
  int rank, world;
};

// Bytes of one block's part, the same on all ranks whatever their tensors' alignment.
SYNCENGINE_BOTH size_t one_shot_part(size_t bytes, int blocks) {
  return ((bytes + blocks - 1) / blocks + 15) / 16 * 16;
}

// Notes that the block is in `epoch`; called by each thread of it. Block 0 counts for the blocks that this call lacks.
SYNCENGINE_BOTH void count_epoch(OneShotArea& area, int block, int blocks, int thread, uint32_t epoch) {
  if (thread == 0) area.epochs[block] = epoch;
  if (block == 0 && thread >= blocks && thread < kOneShotBlocks) area.epochs[thread] = epoch;
}

// Accesses to the words of the protocol, on the device and in threads that stand in for it.
#ifdef __CUDACC__
__device__ __forceinline__ void put_mark(uint64_t* mark, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(mark), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t get_mark(const uint64_t* mark) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(mark) : "memory");
  return value;
}
#else
inline void put_mark(uint64_t* mark, uint64_t value) { __atomic_store_n(mark, value, __ATOMIC_RELEASE); }
inline uint64_t get_mark(const uint64_t* mark) { return __atomic_load_n(mark, __ATOMIC_ACQUIRE); }
#endif

enum class MarkState : uint8_t { NotYet, Here, Bad };

// Whether the mark of `peer` for `epoch` is there, and whether it is the expected one.
#ifdef __CUDACC__
__device__ __forceinline__
#else
inline
#endif
    MarkState look_for(const OneShotArgs& args, int peer, int block, uint32_t epoch) {
  const uint64_t mark = get_mark(&args.areas[args.rank]->marks[epoch & 1][block][peer]);
  if (static_cast<uint32_t>(mark >> 32) != epoch) return MarkState::NotYet;
  if (static_cast<uint32_t>(mark) == args.fingerprint) return MarkState::Here;
  tell_mismatch(*args.control, peer, static_cast<uint32_t>(mark), args.fingerprint);
  return MarkState::Bad;
}

// A block's part as a reduction of what the slots hold. It is not a ReduceArgs: a list of that length on every thread's
// stack would cost the device hundreds of megabytes, and a wait for all of it when the first such kernel starts.
struct OneShotPart {
  const OneShotArgs& call;
  uint32_t half;  // which of the two halves of the slots
  size_t begin;   // bytes
  size_t count;   // elements
  int source_count = call.world, destination_count = 1;
  double scale = call.scale;
};

template <class Stored>
SYNCENGINE_BOTH const Stored* in(const OneShotPart& part, int s) {
  return reinterpret_cast<const Stored*>(part.call.areas[s]->slots[part.half] + part.begin);
}
template <class Stored>
SYNCENGINE_BOTH Stored* out(const OneShotPart& part, int) {
  return reinterpret_cast<Stored*>(static_cast<unsigned char*>(part.call.output) + part.begin);
}

}  // namespace syncengine::cuda
