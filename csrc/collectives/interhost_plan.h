// What one rank does between hosts for one chunk of a collective, as data: a pure function of placement and chunk,
// walked by tests for any placement without a process.
//
// A chunk is cut into cells: ranges of elements that go their own way between hosts. On each host one rank handles a
// cell for all of them. It talks only to the handlers of the same cell on other hosts, so each byte crosses once per
// host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "collectives/operation.h"
#include "collectives/order.h"
#include "collectives/plan.h"

namespace syncengine {

// Which way a collective takes between hosts: the one that is quicker over links of any speed. No bits depend on it.
//
// Ownership: plain data, pure functions: the same on all ranks that were given the same. Failure: none.

// How contributions from several hosts become one sum. The first two give the same bits.
enum class Way : uint8_t {
  Exchange,  // a cell has a home, whose handler gets every rank's own bytes, adds them in order, and returns the result
  Chain,     // the running sum goes from host to host, in the order of ranks; the result comes back the same way
  Sums,      // as Exchange, but of each host's sum (numerics "fast")
};

enum class HostAlgorithm : uint8_t {
  Auto,      // whichever takes less time
  Exchange,  // never from host to host: fewest hops
  Chain,     // from host to host wherever that is possible, at any size
};

// The sizes in bytes from which on something is done.
struct InterhostChoice {
  static constexpr size_t kNever = ~size_t{0};
  size_t chain = kNever;       // all-reduce in rank order takes Chain
  size_t chain_half = kNever;  // the same for 16-bit floats, whose running sum is in float32
  size_t relay = kNever;       // broadcast goes from host to host, not from the root's to all
};

// `chunk_bytes` of an all-reduce that takes many of them.
InterhostChoice choose_interhost(const Placement& placement, HostAlgorithm algorithm, size_t chunk_bytes);

// Not of Numerics::Tree, for which no size matters: the sums of hosts whose ranks have a node of the tree in common,
// if all have; what ranks have themselves otherwise, and where each is alone.
Way choose_way(const InterhostChoice& choice, const Operation& operation);
Way way_of_tree(const Placement& placement, const std::vector<uint8_t>& merges);
bool relays(const InterhostChoice& choice, const Operation& operation);

std::string describe(const InterhostChoice& choice);

enum class Content : uint8_t {
  Raw,      // a rank's contribution; received into scratch
  Partial,  // a running sum; received into scratch
  Result,   // sent from and received into the own output
  Block,    // sent from the own input, received into the own output
};

struct Envelope {
  int peer;
  Content content;
  int rank;     // Raw: whose
  uint32_t id;  // both sides', within the chunk
};

enum class Act : uint8_t {
  Nothing,
  FoldPartial,  // `fold` into scratch
  FoldResult,   // `fold`, scaled and rounded, into the output (and the local peers')
  Spread,       // what came into the own output, to the local peers
};

// In this order: all of `receives`; the local ranks' contributions, if `staged`; `act`; all of `sends`. Peers answer:
// what a step after the first receives leaves its peer only after that one has got all that the step before sends. So
// all receives of a cell can be posted when it begins, even where they go into memory that is still to be sent.
struct InterhostStep {
  bool staged = false;
  std::vector<Envelope> receives = {};
  Act act = Act::Nothing;
  struct Source {
    int rank;  // of a local contribution; -1: what came as receives[received]
    int received;
  };
  std::vector<Source> fold = {};  // in the order of addition; in `ring` by rank
  std::vector<Envelope> sends = {};
};

enum class Spreading : uint8_t { None, Peers, OwnSlot };

struct InterhostCell {
  size_t slot = 0;    // where local contributions lie in their slots
  size_t input = 0;   // the same, in the operation's input
  size_t output = 0;  // where the result goes
  size_t bytes = 0;
  Spreading spreading = Spreading::None;  // results to the local peers' slots, or where these can fetch them
  std::vector<InterhostStep> steps = {};
};

struct InterhostChunk {
  Collective collective;
  Way way;
  int root;
  size_t block;
  size_t begin, length;  // of the block
  bool relay;            // broadcast: from host to host, not from the root to all
};

// Fills `cells`, those of this rank alone.
void plan_interhost(const Placement& placement, const InterhostChunk& chunk, std::vector<InterhostCell>& cells);

// Fills `plan` with what this rank stages and pulls within its host for the same chunk. `chunk.rank` and `root` are
// ranks of the communicator; pulls name local ranks. On the direct path nothing is staged, and results are written into
// all local tensors.
void plan_inside(const Placement& placement, const Chunk& chunk, ChunkPlan& plan);

// [first, second) of stripe `stripe`, and the stripes of one rank, of `length` bytes.
std::pair<size_t, size_t> stripe_of(const Placement& placement, size_t length, int stripe);
std::pair<size_t, size_t> stripes_of(const Placement& placement, size_t length, int rank);

// The rank that handles reduce-scatter's part of `destination`, or all-gather's part from it, on `host`.
int part_handler(const Placement& placement, int host, int destination);

// Ranks of other hosts that `placement.rank` may exchange envelopes with, and so compares operations with.
std::vector<int> counterparts(const Placement& placement);

// One more than the largest envelope id.
uint64_t envelope_ids(const Placement& placement);

}  // namespace syncengine
