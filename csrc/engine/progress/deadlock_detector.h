// Each rank publishes on a board the calls that its sleeping threads wait for, the ranks that have not made those
// calls, and whether it has any other thread that could make calls. A rank is stuck if it has none, and each of its
// waits needs a stuck rank. Stuck ranks remain stuck, since none of them can end another's wait. They are believed to
// be stuck only once each has found its board unchanged again, after all of these boards were seen: so no board is
// older than a call that it says is missing.
//
// Ownership: the arenas outlive it. Thread-safety: under the engine's progress lock. Failure: none; in doubt nobody is
// stuck.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "engine/progress/work.h"
#include "transport/shm/layout.h"

namespace syncengine {

class DeadlockDetector {
 public:
  struct Wait {
    uint64_t group = 0;  // offset of the communicator's block in the waiting rank's arena
    Work::Place place;
    uint64_t missing = 0;  // local ranks that have not made this call
    bool operator==(const Wait&) const = default;
  };

  // `boards` are by local rank, this rank's among them.
  DeadlockDetector(std::vector<shm::WaitBoard*> boards, int local_rank);

  // Publishes the waits of this rank's threads. `everybody`: no other thread of this process can make a call.
  void publish(const std::vector<Wait>& waits, bool everybody);

  // Returns the local ranks that are stuck, this one among them, or 0 while that is not certain.
  uint64_t search();

  // One link of a chain of waits: `rank` waits for `next`. The chain begins at this rank, stays within `stuck`, and
  // ends when it comes back to one of its ranks.
  struct Link {
    int rank;
    Wait wait;
    int next;
  };
  std::vector<Link> chain(uint64_t stuck) const;

  // Returns the waits for a call of this rank that others of `ranks` have published, each with the rank that waits.
  std::vector<std::pair<int, Wait>> waits_for_me(uint64_t ranks) const;

 private:
  struct Board {
    uint64_t version = 0, looks = 0;
    bool everybody = false;
    std::vector<Wait> waits;
  };
  Board read(int rank) const;

  std::vector<shm::WaitBoard*> boards_;
  int me_;
  std::vector<Wait> waits_;  // as published
  bool everybody_ = false;
  std::vector<Board> seen_;   // at the last search
  std::vector<Board> first_;  // when the boards were first seen as they are
};

}  // namespace syncengine
