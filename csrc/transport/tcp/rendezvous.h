// Opens the connections between a rank and its peers: of each pair the higher rank connects to the lower. Any other
// caller is dropped and disturbs nobody.
//
// Ownership: the listener is the caller's. Thread-safety: one thread. Failure: throws, naming the ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/deadline.h"
#include "base/descriptors.h"
#include "transport/tcp/secret.h"
#include "transport/tcp/tcp.h"

namespace syncengine::tcp {

// How two ranks prove to each other, on a new connection, who they are. Pure: bytes in, bytes out.
//
//   client                                         server
//   hello: ranks, connection, nonce,
//          ticket = HMAC(ticket key, hello)   ->
//                                             <-   challenge: nonce, proof = HMAC(proof key, hello, challenge)
//   answer: HMAC(proof key, hello, challenge) ->
//                                             <-   welcome
//
// Both proofs cover both nonces, so that nothing recorded is worth anything later. A stranger without the ticket learns
// nothing, not even that this is a rank. The keys never travel.
//
// Thread-safety: one thread. Failure: result(); never throws.

enum class HandshakeResult : uint8_t {
  Fine,
  Stranger,  // not our protocol, or not this job's
  Secret,    // of this job, but with another secret
};

struct Hello {
  uint16_t connection = 0;  // 0 is for control, the others for data
  uint32_t client = 0;
  uint32_t server = 0;
  std::string nonce;  // 32 bytes
};

// The part of a handshake that both sides have in common. Messages have fixed sizes: read wanted() bytes, give them to
// receive(), send what it returns, until wanted() is 0.
class Handshake {
 public:
  size_t wanted() const { return wanted_; }
  HandshakeResult result() const { return result_; }
  const Hello& hello() const { return hello_; }

 protected:
  std::string end(HandshakeResult result, std::string last_words = "") {
    wanted_ = 0;
    result_ = result;
    return last_words;
  }

  Hello hello_;
  PairKeys keys_;
  std::string said_;  // hello, then challenge: the bytes that the proofs cover
  size_t wanted_ = 0;
  HandshakeResult result_ = HandshakeResult::Stranger;
};

class ClientHandshake : public Handshake {
 public:
  ClientHandshake(Hello hello, PairKeys keys);

  const std::string& first_words() const { return said_; }
  std::string receive(std::string_view message);
};

class ServerHandshake : public Handshake {
 public:
  // Looks up the keys for a hello; returns nothing if no rank of that name is expected here.
  using Admit = std::function<std::optional<PairKeys>(const Hello&)>;
  ServerHandshake(std::string nonce, Admit admit);

  std::string receive(std::string_view message);

  // Whether the client knows the addresses of this job. Only then does the result say anything about a rank.
  bool has_ticket() const { return has_ticket_; }

 private:
  std::string challenge(std::string_view message);

  std::string nonce_;
  Admit admit_;
  bool has_ticket_ = false;
};

// A peer's authenticated connections: the first for control, the others for data.
using Sockets = std::vector<ParentFd>;

class Rendezvous {
 public:
  // `peers` are by rank, without this rank.
  Rendezvous(const Options& options, int rank, const Address& own, std::map<int, Address> peers, int listener);

  std::map<int, Sockets> run(Deadline deadline, const std::function<void()>& interrupted);

 private:
  // One side of a connection that is being opened: once it is connected, `client` or `server` is set.
  struct Call {
    int peer = -1;
    int connection = 0;
    ParentFd fd;
    std::unique_ptr<ClientHandshake> client;  // in calls to lower ranks
    std::unique_ptr<ServerHandshake> server;
    bool connecting = false;
    std::string read;
    Clock::time_point limit = Clock::time_point::max();  // when the call is dropped
    Clock::time_point again{};                           // when a call that broke off is tried anew
    Handshake& handshake() { return client ? static_cast<Handshake&>(*client) : *server; }
  };

  void accept_callers();
  bool is_full() const;
  std::list<Call>::iterator oldest_silent();
  bool has_room() { return !is_full() || oldest_silent() != unauthenticated_.end(); }  // for one more caller
  // advance(), settle(), try_again() and break_off() return whether the call has ended. Else it goes on or starts anew.
  bool advance(Call& call);
  bool settle(Call& call);
  bool try_again(Call& call, const std::string& why);
  bool break_off(Call& call, int code);
  void greet(Call& call);
  std::optional<int> talk(Call& call);
  void doubt(int peer);
  std::string where(int peer) const { return text(peers_.at(peer).ip, peers_.at(peer).port); }
  std::string missing_names() const;

  const Options& options_;
  int rank_;
  Address own_;
  std::map<int, Address> peers_;
  std::map<int, PairKeys> keys_;
  int listener_;
  std::map<int, Sockets> sockets_;
  size_t missing_ = 0;                  // connections
  std::list<Call> calls_;               // to lower ranks
  std::list<Call> unauthenticated_;     // calls from anybody
  std::set<std::string> nonces_;        // of hellos with a ticket, so that none is accepted twice
  std::map<int, std::string> reasons_;  // why the last call to or from a peer failed
  std::set<int> doubted_;               // ranks whose name a caller has used without proof
};

}  // namespace syncengine::tcp
