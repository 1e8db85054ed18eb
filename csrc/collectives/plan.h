// The plan of one rank's work for one chunk of a collective, as data. The plan is a pure function of the chunk, rank
// and world size, so tests check it for any world without starting a process.
//
// All offsets and lengths are bytes. `user` offsets count into the operation's spans, `slot` offsets into a rank's
// staging slot or, on the direct path, into the spans of that rank's tensor, which the peers read in place.
#pragma once

#include <cstddef>
#include <vector>

#include "collectives/operation.h"

namespace syncengine {

// How the bytes move, which never changes the bits of a result.
enum class Path : uint8_t {
  OneShot,  // everybody stages everything and reduces everything: one exchange, for small messages
  Staged,   // ordinary tensors: chunk by chunk through cache-resident slots; the owner of a slice reduces it
  Direct,   // tensors in the arenas: peers read and write them in place
};

struct Chunk {
  Collective collective;
  Path path;
  int rank;
  int world;
  int root;
  size_t block;  // bytes of the operation's block (see block_bytes)
  size_t begin;  // this chunk's part of the block
  size_t length;
  bool stage_all;             // contributions are scaled while they are staged, so a rank stages its own slice too
  bool pull_results = false;  // an owner leaves its slice in its own memory, from where the peers pull it: for memory
                              // to which peers can't write in order (GPUs)
};

struct Pull {
  int peer;
  size_t slot, user, bytes;
  bool operator==(const Pull&) const = default;
};
struct Reduce {
  size_t slot = 0;    // where every rank's contribution lies
  size_t input = 0;   // where this rank's contribution lies in its input
  size_t output = 0;  // where the result goes
  size_t bytes = 0;
  bool own_from_slot = false;
  bool into_peers = false;     // the result also goes where each peer's contribution lay
  bool into_own_slot = false;  // the result also goes into the own slot, for the peers to pull
  bool operator==(const Reduce&) const = default;
};

struct ChunkPlan {
  std::vector<Copy> stage;  // own memory -> own slot
  bool reduces = false;     // needs every peer's stage
  Reduce reduce;
  bool pulls = false;            // needs every peer's reduce (its stage, where nothing is reduced)
  std::vector<Pull> pull;        // peers' slots -> own memory
  bool peers_read_user = false;  // the operation ends for this rank only when no peer pulls any more
  bool operator==(const ChunkPlan&) const = default;
};

// The bytes of what is cut into chunks: of the whole tensor, or of one rank's part of it (reduce-scatter's output,
// all-gather's input).
size_t block_bytes(const Operation& operation);

// Returns how many bytes of the block one chunk covers: what a slot of `slot_bytes` has room for, or on the direct path
// what gives each rank `direct_bytes` of work.
size_t chunk_bytes(Collective collective, Path path, int world, size_t slot_bytes, size_t direct_bytes);

// [first, second) of `rank`'s slice of `length` bytes; boundaries lie on cache lines.
std::pair<size_t, size_t> slice(size_t length, int world, int rank);

// Fills `plan` with what the rank does for `chunk`. Memory that `plan` has is used again.
void plan_chunk(const Chunk& chunk, ChunkPlan& plan);

}  // namespace syncengine
