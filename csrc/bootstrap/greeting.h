// How two processes of a host prove to each other that they know the secret in the address of the one that listens, and
// so belong to one job: any process in the network namespace can read a name of the abstract namespace, and connect to
// it.
//
//   caller                                 listener
//   Greeting: rank, nonce               ->
//                                       <- Challenge: nonce, proof = HMAC(secret, greeting, nonce)
//   Answer: HMAC(secret, challenge)     ->
//
// The secret is never sent, and recorded messages can't be replayed. Pure functions; proofs are compared in constant
// time.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

namespace syncengine {

using Bytes32 = std::array<unsigned char, 32>;

struct Greeting {
  uint32_t magic = 0x73796e63;  // "sync"
  int32_t rank = -1;
  Bytes32 nonce{};
};

struct Challenge {
  Bytes32 nonce{}, proof{};
};

struct Answer {
  Bytes32 proof{};
};

// Throws where the system has no random bytes.
Bytes32 random_bytes();

Challenge challenge(const std::string& secret, const Greeting& greeting);
// Nothing if the listener doesn't know the secret.
std::optional<Answer> answer(const std::string& secret, const Greeting& greeting, const Challenge& challenge);
// Whether the caller knows it.
bool proves(const std::string& secret, const Greeting& greeting, const Challenge& challenge, const Answer& answer);

}  // namespace syncengine
