// Whether this rank's operations of a lane are those of its counterparts on other hosts: each tells the others when it
// opens one. And the operations' flags, which hosts merge in the same way.
//
// Each rank compares its operations with those of its host in shared memory, and with its counterparts' by message: so
// with everybody's, before a byte of theirs is used.
//
// Ownership: its lane's. Thread-safety: under the engine's progress lock. Failure: hear() throws PeerLost for what no
// peer should send, what compares throws Mismatch.
#pragma once

#include <array>
#include <deque>
#include <map>

#include "engine/hosts/links.h"
#include "engine/lanes/lane_state.h"

namespace syncengine::hosts {

class Agreement {
 public:
  Agreement(const Links& links, LaneState& lane);

  void on_opened(uint64_t operation);
  void hear(int member, const Opened& opened);
  void hear(int member, const Flags& flags);

  bool agrees(uint64_t operation, int member) { return agreed(operation) >> member & 1; }
  // With the own host, too. True once all have agreed, and told their flags.
  bool compare(uint64_t operation, LaneState::Active& active);
  uint64_t missing(uint64_t operation) const;  // members that have not agreed, as far as was looked

 private:
  uint64_t agreed(uint64_t operation);  // members whose record is the same
  bool merge_flags(uint64_t operation, LaneState::Active& active, bool complete_here);

  const Links& links_;
  LaneState& lane_;
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
  std::map<uint64_t, Merged> flags_;  // of other hosts, by operation
};

}  // namespace syncengine::hosts
