// How two ranks prove to each other, on a new connection, who they are. Pure: bytes in, bytes out.
//
//   client                                         server
//   hello: ranks, connection, settings, nonce,
//          ticket = HMAC(ticket key, hello)   ->
//                                             <-   challenge: nonce, proof = HMAC(proof key, hello, challenge)
//   answer: HMAC(proof key, hello, challenge) ->
//                                             <-   welcome
//
// Both proofs cover both nonces, so that nothing recorded is worth anything later. A stranger without the ticket learns
// nothing, not even that this is a rank. The keys never travel.
//
// Thread-safety: one thread. Failure: result(); never throws.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "transport/tcp/secret.h"

namespace syncengine::tcp {

enum class HandshakeResult : uint8_t {
  Fine,
  Stranger,  // not our protocol, or not this job's
  Build,     // of another build
  Settings,  // other settings
  Secret,    // of this job, but with another secret
};

struct Hello {
  uint64_t build = 0;       // of the library
  uint16_t connection = 0;  // 0 is for control, the others for data
  uint32_t client = 0;
  uint32_t server = 0;
  uint8_t sockets = 0;
  uint8_t checksum = 0;
  std::string nonce;  // 32 bytes
};

// What both sides have in common. Messages have fixed sizes: read wanted() bytes, give them to receive(), send what it
// returns, until wanted() is 0.
class Handshake {
 public:
  size_t wanted() const { return wanted_; }
  HandshakeResult result() const { return result_; }
  const Hello& hello() const { return hello_; }
  uint64_t their_build() const { return their_build_; }  // where that is the result

 protected:
  std::string end(HandshakeResult result, std::string last_words = "") {
    wanted_ = 0;
    result_ = result;
    return last_words;
  }

  Hello hello_;
  uint64_t their_build_ = 0;
  PairKeys keys_;
  std::string said_;  // hello, then challenge: what proofs are about
  size_t wanted_ = 0;
  HandshakeResult result_ = HandshakeResult::Stranger;
};

class ClientHandshake : public Handshake {
 public:
  ClientHandshake(Hello hello, PairKeys keys);

  const std::string& first_words() const { return said_; }
  std::string receive(std::string_view message);

 private:
  bool answered_ = false;
};

class ServerHandshake : public Handshake {
 public:
  // `admit` looks up the keys for a hello, or finds that nobody of that name is expected here.
  using Admit = std::function<std::optional<PairKeys>(const Hello&)>;
  ServerHandshake(uint8_t sockets, bool checksum, std::string nonce, Admit admit);

  std::string receive(std::string_view message);

  // The client has the addresses of this job: what the result says of it can be believed.
  bool has_ticket() const { return has_ticket_; }

 private:
  std::string challenge(std::string_view message);

  uint8_t sockets_;
  uint8_t checksum_;
  std::string nonce_;
  Admit admit_;
  bool has_ticket_ = false;
};

}  // namespace syncengine::tcp
