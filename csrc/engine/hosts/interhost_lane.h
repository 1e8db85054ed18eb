// A lane whose operations reach over hosts. Within the host it is a Lane of the host's own ranks; between staging and pulling,
// the cells of each chunk go from host to host (collectives/interhost_plan.h), several chunks at a time.
//
// Each rank compares its operations with those of its host in shared memory, and with its counterparts' on other hosts by
// message: so with everybody's, before a byte of theirs is used.
//
// Ownership, thread-safety: as Lane. Failure: advance() throws Mismatch, or what failed a transfer.
#pragma once

#include <array>
#include <deque>
#include <map>

#include "collectives/interhost_runner.h"
#include "engine/hosts/flight.h"
#include "engine/hosts/links.h"
#include "engine/lanes/lane.h"

namespace syncengine::hosts {

class InterhostLane final : public Lane {
 public:
  InterhostLane(const Links& links, const Group& locals, int id, Algorithm algorithm, std::function<bool()> stop,
                Trash& trash);

  static size_t all_reduce_chunk(const Placement& placement);  // bytes, where it takes many

  void hear(int member, const Opened& opened);
  void hear(int member, const Flags& flags);
  // Members of other hosts that hold up the oldest operation.
  uint64_t remote_blocking_ranks() const;
  void fail_all(const std::exception_ptr& error) override;  // after its transfers were withdrawn

 private:
  bool open() override;
  size_t cut(uint64_t operation, Active& active) override;
  void plan(const Chunk& chunk) override;
  bool verify(uint64_t operation, Active& active) override;
  bool reduce_one() override;
  uint64_t pull_blockers(bool all) const override;

  void start_flights();
  bool advance(Flight& flight);
  bool advance(Flight& flight, size_t cell);
  bool may_receive(const Flight& flight, size_t cell, const InterhostStep& step);
  bool may_send(const Flight& flight, size_t cell, const InterhostStep& step);
  bool all_ended(const Flight& flight, const Flight::Transfers& transfers) const;
  void post_receives(Flight& flight, size_t cell, const InterhostStep& step);
  void post_sends(Flight& flight, size_t cell);
  void act(Flight& flight, size_t cell);
  InterhostRunner::View view(const Flight& flight, size_t cell);
  bool is_wide(const Operation& operation) const;  // partial sums are float32, though the dtype is not
  size_t payload_bytes(const Flight& flight, size_t cell, const Envelope& envelope) const;
  uint64_t agreed(uint64_t operation);  // members whose record is the same
  bool agrees(uint64_t operation, int member) { return agreed(operation) >> member & 1; }
  bool merge_flags(uint64_t operation, Active& active, bool complete_here);
  uint64_t tag(const Flight& flight, const Envelope& envelope, size_t bytes) const {
    return tag_of(links_.group, id_, flight.total, envelope.id, bytes);
  }

  const Links& links_;
  InterhostRunner interhost_runner_;
  uint64_t everybody_ = 0;  // all counterparts
  struct Heard {
    uint64_t first = 0;  // number of the oldest record that is kept
    std::deque<shm::OpRecord> records;
  };
  std::map<int, Heard> heard_;           // by counterpart
  std::map<uint64_t, uint64_t> agreed_;  // by operation
  struct Merged {
    bool told = false;
    uint64_t heard = 0;  // counterparts
    std::array<uint64_t, shm::kFlagWords> words = {};
  };
  std::map<uint64_t, Merged> flags_;             // of other hosts, by operation
  std::deque<std::unique_ptr<Flight>> flights_;  // chunks pulled_.total .. started_.total - 1
  std::vector<std::unique_ptr<Flight>> landed_;  // to be used again
  Cursor started_;
};

}  // namespace syncengine::hosts
