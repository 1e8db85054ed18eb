// Describes what one rank asks of its peers: a collective on memory. Plain data, the same on every rank except for
// memory and keepalive.
//
// Ownership: `keepalive` keeps the memory behind `input`, `output` and `flags` alive until the operation has ended. The
// thread that makes progress drops it, so it must not own a communicator. Aliasing: input and output are the same spans
// (in place) or do not overlap.
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

// Gather, scatter and all-to-all begin with a Barrier and continue with messages. The Barrier carries this value in its
// layout_hash, so that ranks that make different calls, or name different roots, get a Mismatch.
enum class ByMessages : uint64_t { Nothing, Gather, Scatter, AllToAll };
const char* name(ByMessages what);

enum class Numerics : uint8_t {
  RankOrder,  // ((g0 + g1) + g2) + ..., 16-bit floats in float32, scaled and rounded once at the end
  Ring,       // Gloo's ring order per chunk, rounded at every hop
  Fast,       // hosts' sums, rounded where they are sent, in the order of hosts; RankOrder on one host
  Tree,       // the binary tree over `leaves`, of which each rank has a node (order.h), rounded at every hop
};
const char* name(Numerics numerics);  // as in init(): "rank_order"

// Hashes a word as FNV-1a does a byte, for what ranks compare and for trace ids: finds mistakes, but resists no attack.
inline uint64_t mix(uint64_t hash, uint64_t value) { return (hash ^ value) * 1099511628211u; }

inline constexpr size_t kMaxFlagWords = 64;  // one for each rank

inline constexpr int kNoRoot = -1;

// A range of bytes that lies in the caller's memory at the offset `user`, and in the staging slot at the offset `slot`.
struct Copy {
  size_t user, slot, bytes;
  bool operator==(const Copy&) const = default;
};

// Records which rank has brought NaN or infinity into a floating-point sum. The ranks that reduce the sum note that in
// `words`: one word for each rank, and one more for sums of finite numbers that overflowed.
//
// Ownership: shared; `on_device` is the same memory. Thread-safety: written while the operation is on its way, by the
// engine or a device's stream; read when the operation has ended there. Aliasing: several operations may use the same
// words.
struct Nonfinite {
  enum Kind : uint64_t { NaN, Inf, MinusInf, None };
  static constexpr uint64_t kNothing = ~uint64_t{0} >> 1;  // a word's initial value

  // Packs an element and its kind so that the smallest word, which note() keeps, is that of the earliest element.
  static constexpr uint64_t pack(uint64_t element, Kind kind) { return element << 2 | kind; }
  static constexpr uint64_t element_of(uint64_t word) { return word >> 2; }
  static constexpr Kind kind_of(uint64_t word) { return static_cast<Kind>(word & 3); }

  std::shared_ptr<uint64_t[]> words = {};
  // Becomes true if any rank of the host has noted something in an operation that has ended here. Null where operations
  // don't show each rank the others' notes, as between hosts: then the ranks exchange their words in any case.
  std::shared_ptr<bool> anywhere = {};
  uint64_t* on_device = nullptr;
  uint64_t begin = 0;  // the number of the operation's first element
  // If this operation is a piece of a larger one: which bytes of that one's input (`user`) lie where in this one's
  // (`slot`). Bytes between the parts are padding.
  std::vector<Copy> parts = {};

  void note(int word, uint64_t element, Kind kind) const {
    words[word] = std::min(words[word], pack(element, kind));
    if (anywhere) *anywhere = true;
  }

  struct Place {
    uint64_t first;  // the number of the element
    size_t valid;    // this many elements from there on belong to the ranks
  };
  // Returns the place of the `count` elements of the input that begin at `byte`. They lie in at most one of `parts`.
  Place locate(size_t byte, size_t count, size_t element_bytes) const {
    if (parts.empty()) return {begin + byte / element_bytes, count};
    for (const Copy& part : parts) {
      if (byte < part.slot || part.slot + part.bytes <= byte) continue;
      const size_t skip = byte - part.slot;
      return {begin + (part.user + skip) / element_bytes, std::min(count, (part.bytes - skip) / element_bytes)};
    }
    return {0, 0};
  }
};

struct Operation {
  Collective collective = Collective::AllReduce;
  DType dtype = DType::Float32;
  ReduceOp op = ReduceOp::Sum;
  Numerics numerics = Numerics::RankOrder;
  uint32_t leaves = 0;  // AllReduce with Numerics::Tree: at least as many as ranks, the same on all of them
  // A rank in the communicator. In a Broadcast, the rank whose values all get. In other collectives, the only rank that
  // wants the result, if there is one; used for comparison and texts only.
  int root = kNoRoot;
  double prescale = 1.0;   // factor on each contribution before it is added (rounded to dtype)
  double postscale = 1.0;  // factor on the result
  SpanList input = {};     // AllReduce, Broadcast: the same spans as `output`
  SpanList output = {};
  // AllReduce: bits that travel with the operation's fingerprint. When the operation has ended, every rank has the bits
  // that any rank set. At most kMaxFlagWords, the same number on all ranks.
  uint64_t* flags = nullptr;
  size_t flag_words = 0;
  uint64_t layout_hash = 0;  // hash of anything else that must agree between ranks (a bucket's parameters)
  std::function<std::string()> describe = {};  // for errors: "bucket 3 (layer.weight, layer.bias)"; may be empty
  std::shared_ptr<void> keepalive = {};
  std::shared_ptr<const Nonfinite> nonfinite = {};  // AllReduce, Sum or Avg of a floating dtype: null to note nothing
};

// Throws InvalidUsage if the operation's `op` has no meaning for its dtype, or if it has too many flags.
void require_supported(const Operation& operation);

// One message that a rank sends to another, or wants to receive from it.
//
// Ownership: `keepalive` keeps the memory alive until the message has ended, as that of an Operation does. Aliasing:
// nobody else touches the memory meanwhile, but several sends may read the same memory. Matching: sends and receives of
// the same channel and tag between two ranks meet in the order of the calls on each side.

struct Message {
  static constexpr int kAnySource = -1;

  int peer = 0;  // rank in the communicator; a receive may name kAnySource
  uint64_t tag = 0;
  uint64_t channel = 0;      // 0 for the program's own messages; others for collectives that consist of messages
  uint64_t fingerprint = 0;  // must agree, as must the number of bytes
  SpanList memory = {};
  std::shared_ptr<std::atomic<int>> source = {};  // gets the sender's rank, if given
  std::function<std::string()> describe = {};     // for errors: "recv(...)"; not empty
  std::shared_ptr<void> keepalive = {};
};

}  // namespace syncengine
