// The order of announced operations over hosts: the first rank of each host tells the job's when all ranks of its host
// have announced one; the job's first rank fixes the order and tells the hosts', which write it to the log of their own
// host.
//
// Ownership, thread-safety: as Schedule. Failure: none of its own.
#pragma once

#include <deque>
#include <map>
#include <vector>

#include "engine/hosts/links.h"
#include "engine/lanes/schedule.h"

namespace syncengine::hosts {

class InterhostSchedule final : public Schedule {
 public:
  InterhostSchedule(const Links& links, const Group& locals, Lane& lane) : Schedule(locals, lane), links_(links) {}

  void hear(int member, const Ready& ready);
  void hear(int member, const Scheduled& scheduled);
  // Members of other hosts that hold up the oldest operation, as far as this rank knows: leaders.
  uint64_t remote_blocking_ranks() const;

 private:
  bool append_ready() override;  // by the first rank of a host
  bool report();
  bool order();
  uint64_t unready(const Announced& waiting) const;  // leaders whose hosts have not, at the job's leader

  const Links& links_;
  std::map<uint64_t, uint64_t> reported_;              // by slot: how often all ranks of the own host had announced it
  std::map<uint64_t, std::map<int, uint64_t>> ready_;  // at the job's leader, by slot and leader of a host: the same
  std::map<uint64_t, uint64_t> ordered_;               // at the job's leader, by slot: how often it was given its turn
  std::deque<uint64_t> next_;                          // slots in their order, not yet in the log
};

}  // namespace syncengine::hosts
