// The words by which GPU ranks wait for each other: one block of shared, pinned host memory per rank.
//
// Ownership: each rank owns its block; peers map it. It is host memory since an abort is then a plain store by the CPU,
// which can't queue behind a stream that waits.
//
// The word `inbox[set][peer]` has two writers in turn: the peer's stream stores a fingerprint; this rank's stream waits
// for that, and stores 0 again. sequence.h says what keeps the two apart, and why words do not count calls.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>

namespace syncengine::cuda {

inline constexpr int kMaxRanks = 16;  // a set of words is one cache line
inline constexpr int kSets = 3;

inline constexpr uint32_t kArrived = 0x80000000;   // set in every fingerprint; waits look at this bit alone
inline constexpr uint32_t kInKernel = kSets + 1;   // a value of `waiting`: see cuda/in_kernel.h
inline constexpr uint32_t kReleased = 0xffffffff;  // no fingerprint: an abort puts it there to end every wait

// The description of a call, for the text of a mismatch. The owner may overwrite it while a peer reads it:
// `fingerprint` is 0 meanwhile, and readers look at it again after reading the letters.
struct CallText {
  std::atomic<uint32_t> fingerprint;
  std::atomic<char> letters[123];  // zeros behind the text

  void write(uint32_t key, const std::string& text);    // by the owner alone; cut if it is longer
  std::optional<std::string> read(uint32_t key) const;  // nothing if another call's text is there
};
static_assert(sizeof(CallText) == 128);

struct Control {
  alignas(64) uint32_t inbox[kSets][kMaxRanks];
  alignas(64) uint32_t waiting;  // set + 1 that the stream waits for, or kInKernel; 0: none. Written by the own stream
  uint32_t progress;             // kernels so far. Written by the own stream's kernels
  uint32_t mismatch[3];      // 1 + a peer that called something else; its fingerprint; the own one. By the own kernels
  uint32_t late[kMaxRanks];  // 1: a kernel waits for this peer for long. Written by the own stream's kernels
  alignas(64) uint32_t aborted;            // 1: kernels neither wait nor write results. Written by the watchdog
  std::atomic<uint32_t> latest;            // fingerprint of the latest call, for messages. Written by the own host
  alignas(64) std::atomic<uint32_t> gone;  // 1: this rank has let go of all peers' memory
  alignas(64) CallText calls[32];          // by fingerprint modulo 32; the latest stays
};

// The CPU's accesses to plain words to which devices, peers' devices and CPUs store.
inline uint32_t load(const uint32_t& word) { return __atomic_load_n(&word, __ATOMIC_ACQUIRE); }
inline void store(uint32_t& word, uint32_t value) { __atomic_store_n(&word, value, __ATOMIC_RELEASE); }

}  // namespace syncengine::cuda
