// What one rank does between hosts for one chunk of a collective, as data: a pure function of placement and chunk,
// walked by tests for any placement without a process.
//
// A chunk is cut into cells: ranges of elements that go their own way between hosts. On each host one rank handles a
// cell for all of them. It talks only to the handlers of the same cell on other hosts, so each byte crosses once per
// host.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/interhost_choice.h"
#include "collectives/operation.h"
#include "collectives/placement.h"
#include "collectives/plan.h"

namespace syncengine {

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
