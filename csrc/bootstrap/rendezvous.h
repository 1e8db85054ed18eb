// One rank's part in an exchange of descriptors: it connects to every peer for its memory, and serves those that
// connect. Single steps, none of which blocks, so that no two ranks wait for each other.
//
// Thread-safety: one thread. Failure: throws as bootstrap/fd_exchange.h says.
#pragma once

#include <array>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/descriptors.h"
#include "base/error.h"
#include "base/texts.h"

namespace syncengine {

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

// How a rank ended connecting, for the ranks that have its memory and still wait for another one's.

struct Goodbye {
  int32_t failed = 0;
  ErrorKind kind = ErrorKind::Aborted;
  char text[248] = {};
};

// Of a peer: where it listens, and what proves that who listens there is it.
struct RendezvousPoint {
  std::string name, secret;
};

class LocalRendezvous {
 public:
  // `places` has the peers, by rank, and this rank; `own` is the descriptor to hand out.
  LocalRendezvous(int rank, std::map<int, RendezvousPoint> places, int own, const UniqueFd& listener, RankNames names);

  // What can be done now. Throws if a peer is lost.
  void step();
  bool over() const { return unserved_.empty() && has_all(); }
  // Until something may have come.
  void wait() const;
  [[noreturn]] void throw_timeout() const;

  // By rank; once it is over.
  std::map<int, UniqueFd> take_memories();
  // Those that have this rank's memory, for last words.
  const std::vector<UniqueFd>& served() const { return served_; }

 private:
  struct Call {
    enum class Stage : uint8_t { Unreached, Greeted, Answered, Received, Over };
    Stage stage = Stage::Unreached;
    UniqueFd socket = {};
    Greeting greeting = {};
    UniqueFd memory = {};
    bool misses_memory() const { return stage < Stage::Received; }
  };
  struct Visitor {
    enum class Stage : uint8_t { Silent, Challenged, Proved };
    UniqueFd socket;
    Stage stage = Stage::Silent;
    Greeting greeting = {};
    Challenge challenge = {};
  };

  void advance(int peer, Call& call);
  void reach(int peer, Call& call);
  // Whether the visitor is to be forgotten: served, or no rank.
  bool advance(Visitor& visitor);
  void accept();
  bool has_all() const;
  static bool is_owed(const Visitor& visitor) { return visitor.stage == Visitor::Stage::Proved; }

  const int rank_, own_;
  const RankNames names_;
  const std::map<int, RendezvousPoint> places_;
  const UniqueFd& listener_;
  std::map<int, Call> calls_;
  std::list<Visitor> visitors_;  // the oldest first
  std::set<int> unserved_, unreachable_, lost_;
  std::vector<UniqueFd> served_;
};

}  // namespace syncengine
