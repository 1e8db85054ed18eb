#include "transport/tcp/rendezvous.h"

#include <utility>

#include "transport/matching/frame.h"

namespace syncengine::tcp {

namespace {

constexpr uint64_t kHandshakeMagic = 0x656e69676e65636e;  // "ncengine"
constexpr size_t kNonceBytes = 32;
constexpr size_t kHelloBytes = 8 + 2 + 4 + 4 + kNonceBytes + kDigestBytes;
constexpr size_t kChallengeBytes = 8 + kNonceBytes + kDigestBytes;
constexpr size_t kWelcomeBytes = 1;

std::string untagged(const Hello& hello) {
  return Writer()
      .u64(kHandshakeMagic)
      .u16(hello.connection)
      .u32(hello.client)
      .u32(hello.server)
      .bytes(hello.nonce)
      .text();
}

std::string challenge_head(const std::string& nonce) { return Writer().u64(kHandshakeMagic).bytes(nonce).text(); }

std::string proof_of(const char* side, const PairKeys& keys, const std::string& said) {
  return hmac_sha256(keys.proof, side + said);
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
  if (wanted_ == kWelcomeBytes) {
    uint8_t result = reader.u8();
    bool fine = reader.whole() && result == static_cast<uint8_t>(HandshakeResult::Fine);
    return end(fine ? HandshakeResult::Fine : HandshakeResult::Secret);
  }
  uint64_t magic = reader.u64();
  std::string nonce = reader.bytes(kNonceBytes), proof = reader.bytes(kDigestBytes);
  if (!reader.whole() || magic != kHandshakeMagic) return end(HandshakeResult::Stranger);
  std::string said = said_ + challenge_head(nonce);
  if (!equal_digests(proof, proof_of("server", keys_, said)))
    return end(HandshakeResult::Secret, std::string(kDigestBytes, '\0'));  // no proof, which tells the server, too
  said_ = said + proof;
  wanted_ = kWelcomeBytes;
  return proof_of("client", keys_, said_);
}

ServerHandshake::ServerHandshake(std::string nonce, Admit admit) : nonce_(std::move(nonce)), admit_(std::move(admit)) {
  wanted_ = kHelloBytes;
}

std::string ServerHandshake::receive(std::string_view message) {
  if (!has_ticket_) return challenge(message);
  HandshakeResult mine =
      equal_digests(message, proof_of("client", keys_, said_)) ? HandshakeResult::Fine : HandshakeResult::Secret;
  return end(mine, Writer().u8(static_cast<uint8_t>(mine)).text());
}

std::string ServerHandshake::challenge(std::string_view message) {
  Reader reader(message);
  uint64_t magic = reader.u64();
  hello_.connection = reader.u16();
  hello_.client = reader.u32();
  hello_.server = reader.u32();
  hello_.nonce = reader.bytes(kNonceBytes);
  std::string ticket = reader.bytes(kDigestBytes);
  if (!reader.whole() || magic != kHandshakeMagic) return end(HandshakeResult::Stranger);
  auto keys = admit_(hello_);
  if (!keys || !equal_digests(ticket, hmac_sha256(keys->ticket, untagged(hello_))))
    return end(HandshakeResult::Stranger);
  has_ticket_ = true;
  keys_ = std::move(*keys);
  const std::string head = challenge_head(nonce_);
  said_ = std::string(message) + head;
  std::string proof = proof_of("server", keys_, said_);
  said_ += proof;
  wanted_ = kDigestBytes;
  return head + proof;
}

}  // namespace syncengine::tcp
