#include "transport/tcp/rendezvous.h"

#include <utility>

#include "base/build_id.h"
#include "transport/matching/frame.h"
#include "transport/tcp/secret.h"

namespace syncengine::tcp {

namespace {

constexpr uint64_t kHandshakeMagic = 0x656e69676e65636e;  // "ncengine"
constexpr size_t kNonceBytes = 32;
constexpr size_t kHelloBytes = 8 + 8 + 2 + 4 + 4 + 1 + 1 + kNonceBytes + kDigestBytes;
constexpr size_t kChallengeBytes = 8 + 8 + 1 + kNonceBytes + kDigestBytes;
constexpr size_t kAnswerBytes = 1 + kDigestBytes;
constexpr size_t kWelcomeBytes = 1;

std::string untagged(const Hello& hello) {
  return Writer()
      .u64(kHandshakeMagic)
      .u64(hello.build)
      .u16(hello.connection)
      .u32(hello.client)
      .u32(hello.server)
      .u8(hello.sockets)
      .u8(hello.checksum)
      .bytes(hello.nonce)
      .text();
}

std::string challenge_head(uint64_t build, HandshakeResult result, const std::string& nonce) {
  return Writer().u64(kHandshakeMagic).u64(build).u8(static_cast<uint8_t>(result)).bytes(nonce).text();
}

std::string proof_of(const char* side, const PairKeys& keys, const std::string& said) {
  return hmac_sha256(keys.proof, side + said);
}

// An answer that says only why not.
std::string refusal(HandshakeResult result) {
  return challenge_head(build_id(), result, std::string(kNonceBytes, '\0')) + std::string(kDigestBytes, '\0');
}

std::string answer(HandshakeResult result, const std::string& proof) {
  return Writer().u8(static_cast<uint8_t>(result)).bytes(proof).text();
}

}  // namespace

ClientHandshake::ClientHandshake(Hello hello, PairKeys keys) {
  hello_ = std::move(hello);
  keys_ = std::move(keys);
  said_ = untagged(hello_);
  said_ += hmac_sha256(keys_.ticket, said_);
  wanted_ = kChallengeBytes;
}

std::string ClientHandshake::receive(std::string_view message) {
  Reader reader(message);
  if (answered_) {
    uint8_t result = reader.u8();
    bool fine = reader.whole() && result == static_cast<uint8_t>(HandshakeResult::Fine);
    return end(fine ? HandshakeResult::Fine : HandshakeResult::Secret);
  }
  uint64_t magic = reader.u64();
  uint64_t build = their_build_ = reader.u64();
  auto result = static_cast<HandshakeResult>(reader.u8());
  std::string nonce = reader.bytes(kNonceBytes), proof = reader.bytes(kDigestBytes);
  if (!reader.whole() || magic != kHandshakeMagic) return end(HandshakeResult::Stranger);
  if (build != build_id()) return end(HandshakeResult::Build);
  if (result != HandshakeResult::Fine)
    return end(result == HandshakeResult::Settings ? result : HandshakeResult::Stranger);
  std::string said = said_ + challenge_head(build, result, nonce);
  if (!equal_digests(proof, proof_of("server", keys_, said)))
    return end(HandshakeResult::Secret, answer(HandshakeResult::Secret, std::string(kDigestBytes, '\0')));
  said_ = said + proof;
  answered_ = true;
  wanted_ = kWelcomeBytes;
  return answer(HandshakeResult::Fine, proof_of("client", keys_, said_));
}

ServerHandshake::ServerHandshake(uint8_t sockets, bool checksum, std::string nonce, Admit admit)
    : sockets_(sockets), checksum_(checksum), nonce_(std::move(nonce)), admit_(std::move(admit)) {
  wanted_ = kHelloBytes;
}

std::string ServerHandshake::receive(std::string_view message) {
  if (!has_ticket_) return challenge(message);
  Reader reader(message);
  uint8_t result = reader.u8();
  std::string proof = reader.bytes(kDigestBytes);
  bool proved = reader.whole() && result == static_cast<uint8_t>(HandshakeResult::Fine) &&
                equal_digests(proof, proof_of("client", keys_, said_));
  HandshakeResult mine = proved ? HandshakeResult::Fine : HandshakeResult::Secret;
  return end(mine, Writer().u8(static_cast<uint8_t>(mine)).text());
}

std::string ServerHandshake::challenge(std::string_view message) {
  Reader reader(message);
  uint64_t magic = reader.u64();
  hello_.build = reader.u64();
  hello_.connection = reader.u16();
  hello_.client = reader.u32();
  hello_.server = reader.u32();
  hello_.sockets = reader.u8();
  hello_.checksum = reader.u8();
  hello_.nonce = reader.bytes(kNonceBytes);
  std::string ticket = reader.bytes(kDigestBytes);
  if (!reader.whole() || magic != kHandshakeMagic) return end(HandshakeResult::Stranger);
  if (hello_.build != build_id()) return end(HandshakeResult::Build, refusal(HandshakeResult::Build));
  auto keys = admit_(hello_);
  if (!keys || !equal_digests(ticket, hmac_sha256(keys->ticket, untagged(hello_))))
    return end(HandshakeResult::Stranger);
  has_ticket_ = true;
  if (hello_.sockets != sockets_ || hello_.checksum != checksum_)
    return end(HandshakeResult::Settings, refusal(HandshakeResult::Settings));
  keys_ = std::move(*keys);
  said_ = std::string(message) + challenge_head(build_id(), HandshakeResult::Fine, nonce_);
  std::string proof = proof_of("server", keys_, said_);
  said_ += proof;
  wanted_ = kAnswerBytes;
  return challenge_head(build_id(), HandshakeResult::Fine, nonce_) + proof;
}

}  // namespace syncengine::tcp
