// A communicator's operations and messages on their way, and what moves them.
//
// Ownership: owns what it has taken over. Thread-safety: under the engine's progress lock. Failure: advance() throws
// what can't go on; the communicator fails, and ends it.
#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "collectives/placement.h"
#include "engine/communicator/interhost_part.h"
#include "engine/communicator/submissions.h"
#include "engine/lanes/lane.h"
#include "engine/lanes/schedule.h"
#include "engine/messages/messenger.h"
#include "engine/progress/group.h"

namespace syncengine {

class Traffic {
 public:
  // Masks are of `locals`, the members on this host. `interhost`: null on one host.
  Traffic(const Group& locals, const Placement& placement, const std::vector<int>& global_ranks, Algorithm algorithm,
          Lane::Trash& trash, InterhostPart* interhost);

  void take(Submissions::Batch& calls);
  bool advance();  // true if anything moved
  void end(Submissions::Batch late, const std::exception_ptr& error);

  // The operation that waits longest, and the members that hold it up.
  struct Pending {
    const Lane::Item* item = nullptr;
    uint64_t blocking_ranks = 0;
  };
  Pending oldest() const;
  uint64_t missing(bool all) const;
  uint64_t interest() const { return missing(false) | messenger_.interest(); }
  // Members that have not made this call. Of a message none: it can't be seen for certain that it will never come.
  uint64_t not_called(const Work::Place& place) const;
  std::vector<ArenaRange> direct_memory() const;
  std::map<std::string, uint64_t> counters() const;

  const Lane& lane(int id) const { return id == shm::kUserLane ? user_lane_ : scheduled_lane_; }
  const Schedule& schedule() const { return *schedule_; }
  const Messenger& messenger() const { return messenger_; }
  Messenger& messenger() { return messenger_; }

 private:
  Lane user_lane_, scheduled_lane_;
  std::unique_ptr<Schedule> schedule_;
  Messenger messenger_;
};

}  // namespace syncengine
