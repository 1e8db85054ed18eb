// Passes each rank's shared memory to its peers on the same host: a descriptor over an abstract AF_UNIX socket, whose peer
// must be the same user. Nothing appears in a file system.
//
// Ownership: the caller owns the descriptor it gives and those it gets. Thread-safety: one thread.
// Failure: throws InvalidUsage, Timeout or PeerLost, naming the ranks; the peers that were served hear of it.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/fd.h"

namespace syncengine {

// What the peers of `rank` raise when this error ends its init(): as it is if it is about other ranks, else in its words.
Error for_peers(int rank, const Error& error);

class Handoff {
 public:
  Handoff();  // listens under a random name

  const std::string& name() const { return name_; }

  // Gives `own` to every other rank and returns theirs by rank (nothing for this one). `names` by rank; those without one are
  // left out.
  // `interrupted` is called now and then and may throw.
  std::vector<UniqueFd> exchange(int rank, const std::vector<std::string>& names, int own, Deadline deadline,
                                 const std::function<void()>& interrupted);

 private:
  // `served`: the connections of those that have got `own`.
  std::vector<UniqueFd> meet(int rank, const std::vector<std::string>& names, int own, Deadline deadline,
                             const std::function<void()>& interrupted, std::vector<UniqueFd>& served);

  std::string name_;
  UniqueFd listener_;
};

}  // namespace syncengine
