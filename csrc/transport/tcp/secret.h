// The secret that the ranks of a job share, and the keys that each pair derives from it.
#pragma once

#include <string>
#include <string_view>

#include "transport/tcp/address.h"

namespace syncengine::tcp {

// SHA-256 (FIPS 180-4) and HMAC (RFC 2104). Pure functions; 32 bytes each.

inline constexpr size_t kDigestBytes = 32;

std::string sha256(std::string_view message);
std::string hmac_sha256(std::string_view key, std::string_view message);

// Compares two digests in a time that does not reveal where they differ.
bool equal_digests(std::string_view a, std::string_view b);

inline constexpr size_t kShortestSecret = 16;  // a shorter one can be guessed from a recorded handshake

// The job's secret: `secret`, or the content of `file` without surrounding white space, or "" if both are "". Throws
// InvalidUsage, whose text never has the secret.
std::string load_secret(const std::string& secret, const std::string& file);

struct PairKeys {
  std::string ticket;  // proves that its owner has seen both addresses: a rank of this job, or anybody who reads its
                       // exchange
  std::string proof;   // proves that its owner knows the secret, too, if there is one
};
PairKeys pair_keys(int rank, const Address& address, int other_rank, const Address& other, const std::string& secret);

}  // namespace syncengine::tcp
