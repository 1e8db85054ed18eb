// A lane's phase between staging and pulling, if its operations reach over hosts: the cells of each chunk go from host
// to host (collectives/interhost_plan.h), several chunks at a time.
//
// Ownership, thread-safety: as Exchange. Failure: advance() throws Mismatch, or the error that failed a transfer.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "collectives/interhost_plan.h"
#include "collectives/runner.h"
#include "engine/hosts/links.h"
#include "engine/lanes/lane_state.h"
#include "engine/progress/options.h"
#include "transport/interhost.h"

namespace syncengine::hosts {

// Compares this rank's operations of a lane with those of its counterparts on other hosts: when a rank opens an
// operation, it tells its counterparts. Merges the operations' flags between hosts in the same way.
//
// A rank compares its operations with those of its host's ranks in shared memory, and with its counterparts' by
// message: so, through these, with those of all ranks, before a byte of theirs is used.
//
// Ownership: its lane's. Thread-safety: under the engine's progress lock. Failure: hear() throws PeerLost for messages
// that no peer should send, compare() throws Mismatch.

class Agreement {
 public:
  Agreement(const Links& links, LaneState& lane);

  void on_opened(uint64_t operation);
  void hear(int member, const Checked<Opened>& opened);
  void hear(int member, const Checked<Flags>& flags);

  bool agrees(uint64_t operation, int member) { return agreed(operation) >> member & 1; }
  // Compares with this host's ranks, too. Returns true once these and all counterparts agree and have told their flags.
  bool compare(uint64_t operation, LaneState::Active& active);
  uint64_t missing(uint64_t operation) const;  // members that have not agreed, as far as is known

 private:
  // Throws PeerLost if `member` is no counterpart, or can't be at operation `number`: each rank opens at most kRecords
  // operations beyond those that have ended on it, and none ends before all ranks have opened it.
  void require_turn(int member, uint64_t number, bool is_next = true) const;
  uint64_t agreed(uint64_t operation);  // members whose record is the same
  bool merge_flags(uint64_t operation, LaneState::Active& active, bool complete_here);

  const Links& links_;
  LaneState& lane_;
  uint64_t everybody_ = 0;                                        // all counterparts
  std::map<int, uint64_t> opened_;                                // so far, by counterpart
  struct Said {                                                   // by counterparts, about one operation
    std::vector<std::pair<int, Checked<shm::OpRecord>>> records;  // not compared yet
    uint64_t agreed = 0;                                          // counterparts, as are the two masks below
    uint64_t flags_of = 0;
    std::array<uint64_t, shm::kFlagWords> flags = {};
    bool told = false;  // this host's flags have been told
  };
  std::map<uint64_t, Said> said_;  // by operation
};

// Memory that is taken piece by piece and given back all at once; its pieces stay where they are.
class Scratch {
 public:
  std::byte* take(size_t bytes);
  void clear() { block_ = used_ = 0; }

 private:
  struct Block {
    std::unique_ptr<std::byte[]> memory;
    size_t bytes;
  };
  std::vector<Block> blocks_;
  size_t block_ = 0, used_ = 0;
};

// One chunk on its way between hosts: its cells, and how far each of them is in its steps.
//
// Ownership: owns the scratch memory that its transfers use; may be destroyed only when it is quiet, or its transfers
// were withdrawn. Thread-safety: under the engine's progress lock.
struct InFlightChunk {
  uint64_t operation = 0, total = 0;  // as in LaneState::Cursor
  std::vector<InterhostCell> cells = {};

  using Transfers = std::vector<std::shared_ptr<Interhost::Transfer>>;
  struct Receives {  // of one step
    Transfers transfers = {};
    std::vector<std::byte*> places = {};  // null: in the output
    int64_t posted = 0;                   // time of posting, while this rank is traced
  };
  struct Progress {
    size_t step = 0;
    bool acted = false;                   // the step's act is done, and its sends are posted
    bool arrived = false;                 // the last act is done
    std::vector<Receives> receives = {};  // of the steps whose receives are posted, all of them as soon as possible
    Transfers sends = {};
    int64_t posted = 0;  // time of posting the sends, while this rank is traced
    std::byte* partial = nullptr;
  };
  std::vector<Progress> progress = {};
  Scratch scratch = {};

  bool arrived() const;  // results are in the local ranks' memory
  bool quiet() const;    // and no byte of the chunk moves any more
};

class InterhostExchange final : public Exchange {
 public:
  InterhostExchange(const Links& links, LaneState& lane, Algorithm algorithm);

  static size_t all_reduce_chunk(const Placement& placement);  // in bytes, for an all-reduce of many chunks

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
  bool advance(InFlightChunk& chunk, size_t cell);
  bool may_move(const InFlightChunk& chunk, size_t cell, const std::vector<Envelope>& envelopes, bool sends);
  bool all_ended(const InFlightChunk& chunk, const InFlightChunk::Transfers& transfers) const;
  void post_receives(InFlightChunk& chunk, size_t cell, const InterhostStep& step);
  void post_sends(InFlightChunk& chunk, size_t cell, const InterhostStep& step);
  void act(InFlightChunk& chunk, size_t cell, const InterhostStep& step);
  void trace_transfers(const InFlightChunk& chunk, size_t cell, const std::vector<Envelope>& envelopes, int64_t posted,
                       const char* direction) const;
  InterhostRunner::View view(const InFlightChunk& chunk, size_t cell);
  Way way_of(const Operation& operation) const;
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
  std::vector<std::unique_ptr<InFlightChunk>> landed_;    // kept to be used again
  LaneState::Cursor started_;
  mutable TreeMerges tree_;
};

}  // namespace syncengine::hosts
