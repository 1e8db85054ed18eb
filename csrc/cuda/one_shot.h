// All-reduce of few bytes by one kernel, a sum of a floating dtype: each block stages its part, tells the peers' same
// block, waits for theirs, and reduces all parts itself. The wait is in the kernel, since a stream's costs more than
// such a message; it looks at the abort word.
//
// Epochs are counted in device memory, by the kernel: a replayed graph goes on where the last call was. Slots and marks
// take turns: a peer writes those of epoch e + 2 only after this rank's mark of e + 1, which this rank writes after it
// is done with e. Each call cuts the slots anew, so all blocks are always in the same epoch, those too that a small
// call does without.
//
// Ownership: none. Aliasing: input and output are the same or do not overlap. Failure: as in body.h.
#pragma once

#include "cuda/body.h"

namespace syncengine::cuda {

inline constexpr int kOneShotBlocks = 16;
inline constexpr size_t kOneShotBytes = 128 << 10;  // not yet tuned on a GPU

// In device memory that all peers reach; zeros at first.
struct OneShotArea {
  alignas(64) uint64_t marks[2][kOneShotBlocks][kMaxRanks];  // of each peer, by it: epoch << 32 | fingerprint
  alignas(64) uint32_t epochs[kOneShotBlocks];               // of each block, by the own kernels
  alignas(64) unsigned char slots[2][kOneShotBytes];         // the own input
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

// What thread `thread` of a block does once the block is in `epoch`.
SYNCENGINE_BOTH void count_epoch(OneShotArea& area, int block, int blocks, int thread, uint32_t epoch) {
  if (thread == 0) area.epochs[block] = epoch;
  if (block == 0 && thread >= blocks && thread < kOneShotBlocks) area.epochs[thread] = epoch;
}

// The words of the protocol, for the device and for the threads that stand in for it.
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

enum class Arrival : uint8_t { NotYet, Here, Bad };

// What the mark of `peer` for `epoch` says.
#ifdef __CUDACC__
__device__ __forceinline__
#else
inline
#endif
    Arrival look_for(const OneShotArgs& args, int peer, int block, uint32_t epoch) {
  const uint64_t mark = get_mark(&args.areas[args.rank]->marks[epoch & 1][block][peer]);
  if (static_cast<uint32_t>(mark >> 32) != epoch) return Arrival::NotYet;
  if (static_cast<uint32_t>(mark) == args.fingerprint) return Arrival::Here;
  tell_mismatch(*args.control, peer, static_cast<uint32_t>(mark), args.fingerprint);
  return Arrival::Bad;
}

// A block's part as a reduction of what the slots hold. Not ReduceArgs: as long a list on every thread's stack costs
// the device hundreds of megabytes, and a wait for all of it when the first such kernel starts.
struct OneShotPart {
  const OneShotArgs& call;
  uint32_t half;  // of the slots
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
