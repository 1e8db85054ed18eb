// What one rank asks of its peers: a collective on memory. Plain data; the same on every rank but for memory and
// keepalive.
//
// Ownership: `keepalive` keeps the memory behind `input`, `output` and `flags` alive until the operation has ended. It
// is let go of by whichever thread makes progress, so it must not own a communicator. Aliasing: input and output are
// the same spans (in place) or do not overlap.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "collectives/spans.h"

namespace syncengine {

enum class Collective : uint8_t { AllReduce, Broadcast, ReduceScatter, AllGather, Barrier };
const char* name(Collective collective);

// What a Barrier begins, where messages do the rest: it compares on all ranks that they mean the same, root included.
// Its layout_hash.
enum class ByMessages : uint64_t { Nothing, Gather, Scatter, AllToAll };
const char* name(ByMessages what);

enum class Numerics : uint8_t {
  RankOrder,  // ((g0 + g1) + g2) + ..., 16-bit floats in float32, scaled and rounded once at the end
  Ring,       // Gloo's ring order per chunk, rounded at every hop
  Fast,       // each host's sum, rounded, then these in the order of hosts; RankOrder on one host
  Tree,       // the binary tree over `leaves`, of which each rank has a node (order.h), rounded at every hop
};
const char* name(Numerics numerics);  // as in init(): "rank_order"

inline constexpr size_t kMaxFlagWords = 64;  // one for each rank

inline constexpr int kNoRoot = -1;

// A run of bytes that lies in the caller's memory at `user`, and in a slot at `slot`.
struct Copy {
  size_t user, slot, bytes;
};
// The one that has this byte of the slot; null: none.
inline const Copy* copy_at(const std::vector<Copy>& copies, size_t slot) {
  for (const Copy& copy : copies)
    if (copy.slot <= slot && slot < copy.slot + copy.bytes) return &copy;
  return nullptr;
}

// Who brought into a floating-point sum what is NaN or infinite. The ranks that reduce it note that in `words`: one for
// each rank, and one more for what only the sum has made of finite numbers, by overflow.
//
// Ownership: shared; `on_device` is the same memory. Thread-safety: written while the operation is on its way, by the
// engine or a device's stream; read when it has ended there. Aliasing: several operations may note in the same words.
struct Nonfinite {
  enum Kind : uint64_t { NaN, Inf, MinusInf, None };
  static constexpr uint64_t kNothing = ~uint64_t{0} >> 1;  // the words at first

  // The earliest one stays.
  static constexpr uint64_t pack(uint64_t element, Kind kind) { return element << 2 | kind; }
  static constexpr uint64_t element_of(uint64_t word) { return word >> 2; }
  static constexpr Kind kind_of(uint64_t word) { return static_cast<Kind>(word & 3); }

  std::shared_ptr<uint64_t[]> words = {};
  // On one host: becomes true where any rank has noted something in an operation that has ended here. Null: the ranks
  // ask each other.
  std::shared_ptr<bool> anywhere = {};
  uint64_t* on_device = nullptr;
  uint64_t begin = 0;  // what the operation's first element is called
  // Of a part of a larger operation: where its input, a slot, comes from. What lies between is nobody's.
  std::vector<Copy> parts = {};

  void note(int word, uint64_t element, Kind kind) const {
    words[word] = std::min(words[word], pack(element, kind));
    if (anywhere) *anywhere = true;
  }

  struct Place {
    uint64_t first;  // what the element is called
    size_t valid;    // so many elements from there on are the ranks'
  };
  // Of [byte, byte + bytes) of the input, which lies in one part at most.
  Place locate(size_t byte, size_t bytes, size_t element_bytes) const {
    if (parts.empty()) return {begin + byte / element_bytes, bytes / element_bytes};
    const Copy* part = copy_at(parts, byte);
    if (!part) return {0, 0};
    const size_t skip = byte - part->slot;
    return {begin + (part->user + skip) / element_bytes, std::min(bytes, part->bytes - skip) / element_bytes};
  }
};

struct Operation {
  Collective collective = Collective::AllReduce;
  DType dtype = DType::Float32;
  ReduceOp op = ReduceOp::Sum;
  Numerics numerics = Numerics::RankOrder;
  uint32_t leaves = 0;  // AllReduce with Numerics::Tree: at least as many as ranks, the same on all of them
  // A rank in the communicator. Broadcast: whose values all get. Others: who alone wants the result, if anybody, which
  // is for comparison and messages.
  int root = kNoRoot;
  double prescale = 1.0;   // factor on each contribution before it is added (rounded to dtype)
  double postscale = 1.0;  // factor on the result
  SpanList input = {};     // AllReduce, Broadcast: the same spans as output
  SpanList output = {};
  // AllReduce: bits that travel with the operation's fingerprint. When it has ended, every rank has those that any rank
  // set. At most kMaxFlagWords, the same number on all ranks.
  uint64_t* flags = nullptr;
  size_t flag_words = 0;
  uint64_t layout_hash = 0;                    // anything else that must agree between ranks (a bucket's parameters)
  std::function<std::string()> describe = {};  // for errors: "bucket 3 (layer.weight, layer.bias)"; may be empty
  std::shared_ptr<void> keepalive = {};
  std::shared_ptr<const Nonfinite> nonfinite = {};  // AllReduce, Sum or Avg of a floating dtype: null to note nothing
};

// Throws InvalidUsage where the op has no meaning for the dtype.
void require_supported(const Operation& operation);

// What one rank sends to another one, or wants to receive from it.
//
// Ownership: `keepalive` keeps the memory alive until the message has ended, as that of an Operation does.
// Aliasing: nobody else touches the memory meanwhile, but several sends may read the same.
// Matching: a send and a receive of the same channel and tag between two ranks, in the order of the calls on each side.

struct Message {
  static constexpr int kAnySource = -1;

  int peer = 0;  // rank in the communicator; receiving also kAnySource
  uint64_t tag = 0;
  uint64_t channel = 0;      // 0: the program's own messages; others belong to what is made of messages
  uint64_t fingerprint = 0;  // must agree, as must the number of bytes
  SpanList memory = {};
  std::shared_ptr<std::atomic<int>> source = {};  // gets the sender's rank, if given
  std::function<std::string()> describe = {};     // for errors: "recv(...)"; not empty
  std::shared_ptr<void> keepalive = {};
};

}  // namespace syncengine
