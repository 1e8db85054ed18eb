// Passes each rank's shared memory to its peers on the same host: a descriptor over an abstract AF_UNIX socket, to
// processes of the same user that prove that they know the secret in the address (bootstrap/greeting.h). Nothing
// appears in a file system.
//
// Ownership: the caller owns the descriptor it gives and those it gets. Thread-safety: one thread.
// Failure: throws InvalidUsage, Timeout or PeerLost, naming the ranks; peers that have been served are told.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/fd.h"
#include "base/texts.h"

namespace syncengine {

// What the peers of `rank` (of the whole job) raise when this error ends its init(): as it is if it is about other
// ranks, else in its words.
Error for_peers(int rank, const Error& error);

class FdExchange {
 public:
  FdExchange();  // listens under a random name

  // The socket's name and a new secret, for the peers alone: "name/secret", shorter than kMostAddress.
  std::string address() const { return name_ + "/" + secret_; }
  static constexpr size_t kMostAddress = 144;
  const std::string& name() const { return name_; }

  // Gives `own` to every other rank and returns theirs by rank (nothing for this one). `addresses` by rank; those
  // without one are left out.
  // `interrupted` is called now and then and may throw. Messages say `names`.
  std::vector<UniqueFd> exchange(int rank, const std::vector<std::string>& addresses, int own, Deadline deadline,
                                 const std::function<void()>& interrupted, const RankNames& names = {});

 private:
  std::string name_, secret_;
  UniqueFd listener_;
};

}  // namespace syncengine
