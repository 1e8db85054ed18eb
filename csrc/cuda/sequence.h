// A collective as a sequence of steps for one rank's stream: exchanges of words with all peers, and kernels between
// them. It knows no device: the core's tests run the same sequences on threads, and walk all their interleavings.
//
// Ownership: none. Thread-safety: reentrant; the steps of one group must reach its stream in one order. Aliasing: as in
// Operation. Failure: what Steps throws.
//
// Words that go back to 0 can't get lost, for the following reason. A rank puts a fingerprint into a peer's word, the
// peer waits for it, and later makes it 0, before its own next signal to anybody. So the word may be used again as soon
// as this rank has waited for that next signal. Exchanges are between all ranks, and two that follow each other never
// use the same set of words: within a collective they take turns with sets 0 and 1, its last one takes set 2, and each
// collective has at least two. Therefore between two uses of a word lies an exchange that was waited for. Nothing is
// counted on the host, for a captured graph's values are constants: replays and eager calls may follow in any order.
#pragma once

#include <cstdint>
#include <vector>

#include "collectives/operation.h"
#include "collectives/plan.h"
#include "cuda/in_kernel.h"

namespace syncengine::cuda {

struct WordExchange {
  int set;         // of the words
  int reset;       // the set whose own words become 0 first; -1: none
  uint32_t value;  // what peers find
  bool last;       // own words of `set` become 0, too, once they have been waited for
};

class Steps {
 public:
  virtual ~Steps() = default;
  virtual void exchange(const WordExchange& exchange) = 0;
  virtual void reduce(const kernels::Reduction& reduction, const ReduceArgs& args) = 0;
  virtual void note(const kernels::Reduction& reduction, const NoteArgs& args) = 0;
  virtual void copy(const CopyArgs& args) = 0;
  virtual void in_kernel(const kernels::Reduction& reduction, const InKernelArgs& args) = 0;
};

// Queues copies as few kernels. Each kernel first makes the same check of the peers' words, `gate`, if there is one.
class Copies {
 public:
  explicit Copies(Steps& steps, const Gate& gate = {}) : steps_(steps) { args_.gate = gate; }

  void add(void* to, const void* from, size_t bytes) {
    if (args_.pieces == kMaxRanks) flush();
    args_.destinations[args_.pieces] = to;
    args_.sources[args_.pieces] = from;
    args_.bytes[args_.pieces++] = bytes;
  }
  // Queues what remains; returns whether any copy was ever added.
  bool flush() {
    if (args_.pieces == 0) return any_;
    steps_.copy(args_);
    args_.pieces = 0;
    return any_ = true;
  }

 private:
  Steps& steps_;
  CopyArgs args_{};
  bool any_ = false;
};

// One rank's place in its group, its words, and all ranks' slots and InKernelAreas, at the addresses for its kernels.
struct Site {
  int rank = 0, world = 1;
  Control* control = nullptr;        // this rank's
  std::vector<std::byte*> slots;     // of each rank, two halves of `slot_bytes` each
  std::vector<InKernelArea*> areas;  // of each rank; empty: there are none, and no kernel waits
  size_t slot_bytes = 0;
};

struct MemoryRoute {
  Path path = Path::Staged;
  std::vector<SpanList> memories = {};  // direct only: of each rank, the operation's input
  uint64_t place = 0;                   // direct only: identifies that memory; must agree between ranks
};

// Hashes what must agree between ranks, before they use a byte. The hash has the bit kArrived, and is never kReleased.
uint32_t fingerprint(const Operation& operation, Path path, uint64_t place);

// Whether one kernel can do this all-reduce: by one shot on Path::OneShot, by two on Path::Staged.
bool fits_one_kernel(const Operation& operation, const Site& site, const MemoryRoute& route);

void run_sequence(const Operation& operation, const Site& site, const MemoryRoute& route, uint32_t fingerprint,
                  Steps& steps);

}  // namespace syncengine::cuda
