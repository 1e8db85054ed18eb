#include "bootstrap/greeting.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <string_view>

#include "base/error.h"
#include "transport/tcp/sha256.h"

namespace syncengine {

namespace {

static_assert(sizeof(Greeting) == 40 && sizeof(Challenge) == 64 && sizeof(Answer) == 32);  // no padding to sign

template <class T>
std::string_view view(const T& message) {
  return {reinterpret_cast<const char*>(&message), sizeof(message)};
}

Bytes32 proof(const std::string& secret, const char* side, const Greeting& greeting, const Bytes32& nonce) {
  std::string said = std::string(side).append(view(greeting)).append(view(nonce));
  const std::string digest = tcp::hmac_sha256(secret, said);
  Bytes32 bytes;
  std::copy(digest.begin(), digest.end(), bytes.begin());
  return bytes;
}

}  // namespace

Bytes32 random_bytes() {
  Bytes32 bytes;
  if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    throw_system_error("no random bytes", errno);
  return bytes;
}

Challenge challenge(const std::string& secret, const Greeting& greeting) {
  const Bytes32 nonce = random_bytes();
  return {.nonce = nonce, .proof = proof(secret, "listener", greeting, nonce)};
}

std::optional<Answer> answer(const std::string& secret, const Greeting& greeting, const Challenge& challenge) {
  if (!tcp::equal_digests(view(challenge.proof), view(proof(secret, "listener", greeting, challenge.nonce))))
    return std::nullopt;
  return Answer{.proof = proof(secret, "caller", greeting, challenge.nonce)};
}

bool proves(const std::string& secret, const Greeting& greeting, const Challenge& challenge, const Answer& answer) {
  return tcp::equal_digests(view(answer.proof), view(proof(secret, "caller", greeting, challenge.nonce)));
}

}  // namespace syncengine
