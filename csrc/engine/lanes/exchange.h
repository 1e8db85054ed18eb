// What takes the place of a lane's reduce phase where its operations reach over hosts: chunks on their way between
// them. hosts/interhost_exchange.h is one.
//
// Ownership: the lane's, with whose state it works. Thread-safety: under the engine's progress lock. Failure: Mismatch,
// or what failed a transfer.
#pragma once

#include <cstdint>

#include "collectives/plan.h"
#include "engine/lanes/lane_state.h"

namespace syncengine {

class Exchange {
 public:
  using Active = LaneState::Active;
  virtual ~Exchange() = default;

  virtual void on_opened(uint64_t operation) = 0;  // its record is published on this host
  virtual Path wanted_path(const Active& active) const = 0;
  virtual size_t chunk_bytes(const Active& active) const = 0;  // the same on all hosts, whatever the path
  virtual void plan(const Chunk& chunk, ChunkPlan& plan) const = 0;
  // In the place of LaneState::compare(): with the other hosts', too.
  virtual bool compare(uint64_t operation, Active& active) = 0;

  virtual bool advance() = 0;                              // true if anything moved
  virtual bool has_arrived(uint64_t chunk) const = 0;      // of the lane: its results are in this host's memory
  virtual bool uses_own_memory(uint64_t chunk) const = 0;  // its envelopes still leave this rank's memory
  virtual void drop_all() = 0;                             // after its transfers were withdrawn
};

}  // namespace syncengine
