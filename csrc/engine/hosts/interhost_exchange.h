// A lane's phase between staging and pulling, where its operations reach over hosts: the cells of each chunk go from
// host to host (collectives/interhost_plan.h), several chunks at a time.
//
// Ownership, thread-safety: as Exchange. Failure: advance() throws Mismatch, or what failed a transfer.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "collectives/interhost_runner.h"
#include "engine/hosts/agreement.h"
#include "engine/hosts/in_flight_chunk.h"
#include "engine/hosts/links.h"
#include "engine/lanes/exchange.h"
#include "engine/progress/options.h"

namespace syncengine::hosts {

class InterhostExchange final : public Exchange {
 public:
  InterhostExchange(const Links& links, LaneState& lane, Algorithm algorithm);

  static size_t all_reduce_chunk(const Placement& placement);  // bytes, where it takes many

  Agreement& agreement() { return agreement_; }
  // Members of other hosts that hold up the oldest operation.
  uint64_t remote_blocking_ranks() const;

  void on_opened(uint64_t operation) override { agreement_.on_opened(operation); }
  Path wanted_path(const Active& active) const override;
  size_t chunk_bytes(const Active& active) const override;
  void plan(const Chunk& chunk, ChunkPlan& plan) const override;
  bool compare(uint64_t operation, Active& active) override { return agreement_.compare(operation, active); }
  bool advance() override;
  bool has_arrived(uint64_t chunk) const override;
  bool uses_own_memory(uint64_t chunk) const override;
  void drop_all() override { in_flight_.clear(); }

 private:
  void start_chunks();
  bool advance(InFlightChunk& chunk);
  bool advance(InFlightChunk& chunk, size_t cell);
  bool may_receive(const InFlightChunk& chunk, size_t cell, const InterhostStep& step);
  bool may_send(const InFlightChunk& chunk, size_t cell, const InterhostStep& step);
  bool all_ended(const InFlightChunk& chunk, const InFlightChunk::Transfers& transfers) const;
  void post_receives(InFlightChunk& chunk, size_t cell, const InterhostStep& step);
  void post_sends(InFlightChunk& chunk, size_t cell);
  void act(InFlightChunk& chunk, size_t cell);
  InterhostRunner::View view(const InFlightChunk& chunk, size_t cell);
  bool is_wide(const Operation& operation) const;  // partial sums are float32, though the dtype is not
  size_t payload_bytes(const InFlightChunk& chunk, size_t cell, const Envelope& envelope) const;
  uint64_t tag(const InFlightChunk& chunk, const Envelope& envelope, size_t bytes) const {
    return tag_of(links_.group, lane_.id, chunk.total, envelope.id, bytes);
  }

  const Links& links_;
  LaneState& lane_;
  const Algorithm algorithm_;
  InterhostRunner runner_;
  Agreement agreement_;
  std::deque<std::unique_ptr<InFlightChunk>> in_flight_;  // chunks lane_.pulled.total .. started_.total - 1
  std::vector<std::unique_ptr<InFlightChunk>> landed_;    // to be used again
  LaneState::Cursor started_;
};

}  // namespace syncengine::hosts
