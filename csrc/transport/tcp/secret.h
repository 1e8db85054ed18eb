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

// In a time that does not tell where they differ.
bool equal_digests(std::string_view a, std::string_view b);

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
