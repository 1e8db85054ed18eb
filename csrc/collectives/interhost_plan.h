// The plan of one rank's work between hosts for one chunk of a collective, as data. The plan is a pure function of
// placement and chunk, so tests check it for any placement without starting a process.
//
// A chunk is cut into cells: ranges of elements that travel between hosts independently. One rank of each host handles
// a cell for its whole host. It talks only to the handlers of the same cell on other hosts, so each byte crosses once
// per host.
//
// Ownership: plain data, pure functions: the same on all ranks that were given the same. Failure: none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "collectives/operation.h"
#include "collectives/order.h"
#include "collectives/plan.h"

namespace syncengine {

// How contributions from several hosts become one sum. Exchange and Chain give the same bits.
enum class Way : uint8_t {
  Exchange,  // a cell has a home, whose handler gets every rank's own bytes, adds them in order, and returns the result
  Chain,     // the running sum goes from host to host, in the order of ranks; the result goes back in reverse
  Sums,      // like Exchange, but each host sends one sum (numerics "fast")
};

enum class HostAlgorithm : uint8_t {
  Auto,      // whichever takes less time
  Exchange,  // never from host to host: fewest hops
  Chain,     // from host to host wherever that is possible, at any size
};

// The sizes in bytes from which on a collective takes another way between hosts, as that is quicker then, over links of
// any speed. The bits of results do not depend on these sizes.
struct InterhostChoice {
  static constexpr size_t kNever = ~size_t{0};
  size_t chain = kNever;       // all-reduce in rank order takes Chain
  size_t chain_half = kNever;  // `chain` for 16-bit floats, whose running sum is in float32
  size_t relay = kNever;       // broadcast goes from host to host, not from the root's host to all

  bool relays(const Operation& operation) const { return operation.input.bytes() >= relay; }
};

// Chooses the sizes of an InterhostChoice. `chunk_bytes`: the size of a chunk of an all-reduce that takes many of them.
InterhostChoice choose_interhost(const Placement& placement, HostAlgorithm algorithm, size_t chunk_bytes);

// choose_way(): the way for any numerics but Tree. way_of_tree(): the way for Tree, at any size. It is Sums if on every
// host the nodes of its ranks make up a whole subtree; otherwise, and if every rank is alone on its host, Exchange.
Way choose_way(const InterhostChoice& choice, const Operation& operation);
Way way_of_tree(const Placement& placement, const std::vector<uint8_t>& merges);

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
  int rank;     // Raw: whose contribution; Partial: -1
  uint32_t id;  // the same on both sides, unique within the chunk
};

enum class Act : uint8_t {
  Nothing,
  FoldPartial,  // adds `fold` up, into scratch
  FoldResult,   // adds `fold` up, scaled and rounded, into the output (and the local peers')
  Spread,       // copies what came into the own output to the local peers
};

// One step of a cell, in this order: waits for all of `receives`; waits for the local ranks' contributions, if
// `staged`; does `act`; sends all of `sends`.
//
// Peers take turns: what a step after the first one receives, a peer sends only when it has got all that the step
// before sends. So all receives of a cell can be posted when the cell begins, even into memory that this rank has yet
// to send.
struct InterhostStep {
  bool staged = false;
  std::vector<Envelope> receives = {};
  Act act = Act::Nothing;
  struct FoldSource {
    int rank;  // whose local contribution; -1: the source is receives[received]
    int received;
  };
  std::vector<FoldSource> fold = {};  // in the order of addition; with numerics `ring` by rank
  std::vector<Envelope> sends = {};
};

enum class Spreading : uint8_t { None, Peers, OwnSlot };

struct InterhostCell {
  size_t slot = 0;    // where local contributions lie in their slots
  size_t input = 0;   // where the cell lies in the operation's input
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

// Fills `cells` with those cells of the chunk that this rank handles.
void plan_interhost(const Placement& placement, const InterhostChunk& chunk, std::vector<InterhostCell>& cells);

// Fills `plan` with what this rank stages and pulls within its host for a chunk that also goes between hosts. In
// `chunk`, `rank` and `root` are ranks of the communicator; in `plan`, the peers of pulls are numbered within the host.
// On the direct path nothing is staged, and results are written into all local tensors.
void plan_inside(const Placement& placement, const Chunk& chunk, ChunkPlan& plan);

// The range [first, second) that all stripes of one rank cover in a chunk of `length` bytes.
std::pair<size_t, size_t> stripes_of(const Placement& placement, size_t length, int rank);

// The rank that handles rank `destination`'s part of a reduce-scatter or all-gather on `host`.
int part_handler(const Placement& placement, int host, int destination);

// Ranks of other hosts with which `placement.rank` may exchange envelopes, and therefore compares operations.
std::vector<int> counterparts(const Placement& placement);

}  // namespace syncengine
