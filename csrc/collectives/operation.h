// What one rank asks of its peers: a collective on memory. Plain data; the same on every rank but for memory and
// keepalive.
//
// Ownership: `keepalive` keeps the memory behind `input`, `output` and `flags` alive until the operation has ended. It
// is let go of by whichever thread makes progress, so it must not own a communicator. Aliasing: input and output are
// the same spans (in place) or do not overlap.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

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
};
const char* name(Numerics numerics);  // as in init(): "rank_order"

inline constexpr size_t kMaxFlagWords = 64;

inline constexpr int kNoRoot = -1;

struct Operation {
  Collective collective = Collective::AllReduce;
  DType dtype = DType::Float32;
  ReduceOp op = ReduceOp::Sum;
  Numerics numerics = Numerics::RankOrder;
  // A rank in the communicator. Broadcast: whose values all get. Others: who alone wants the result, if anybody, which
  // is for comparison and messages.
  int root = kNoRoot;
  double prescale = 1.0;   // factor on each contribution before it is added (rounded to dtype)
  double postscale = 1.0;  // factor on the result
  SpanList input = {};     // AllReduce, Broadcast: the same spans as output
  SpanList output = {};
  // AllReduce: a few bits that travel with the operation's fingerprint. When it has ended, every rank has those that
  // any rank set. At most kMaxFlagWords, the same number on all ranks.
  uint64_t* flags = nullptr;
  size_t flag_words = 0;
  uint64_t layout_hash = 0;                    // anything else that must agree between ranks (a bucket's parameters)
  std::function<std::string()> describe = {};  // for errors: "bucket 3 (layer.weight, layer.bias)"; may be empty
  std::shared_ptr<void> keepalive = {};
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
