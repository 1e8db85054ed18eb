// The secret that the ranks of a job share, and the keys that each pair derives from it.
#pragma once

#include <string>

#include "transport/tcp/address.h"

namespace syncengine::tcp {

inline constexpr size_t kShortestSecret = 16;  // a shorter one is guessed from one recorded handshake

// The job's secret: `secret`, or what stands in `file` (without white space around it), or "" if both are "".
// Throws InvalidUsage, never with the secret in its text.
std::string load_secret(const std::string& secret, const std::string& file);

struct PairKeys {
  std::string ticket;  // whoever has it has seen both addresses: a rank of this job, or somebody who reads its exchange
  std::string proof;   // whoever has it knows the secret too, if there is one
};
PairKeys pair_keys(int rank, const Address& address, int other_rank, const Address& other, const std::string& secret);

}  // namespace syncengine::tcp
